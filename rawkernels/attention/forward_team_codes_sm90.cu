// attention/forward_codes_sm90.cu where a key head has several tiles of queries: thread blocks with
// a tile each expand a block's codes once for all of them, through a ring in global memory
// (attention/expand_team_sm90.cuh). Queries are rotated as keys are. The numbers are the same.
#include "attention/expand_team_sm90.cuh"
#include "attention/forward_sm90.cu"
