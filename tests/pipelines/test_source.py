"""The models say what the sources say."""

from __future__ import annotations

import types

import pytest

from tests.pipelines import source


@pytest.mark.parametrize("kernel", source.SKELETONS)
def test_the_model_was_written_after_this_source(kernel):
    """What a kernel's warps do to each other has not changed since its model was last compared with
    it. If it has: change the roles in tests/pipelines/ as the source was changed, see that the
    tests beside them pass, and write the skeleton down by ``python -m tests.pipelines``."""
    written = source.SKELETONS[kernel].read_text(encoding="utf-8").splitlines()
    assert source.skeleton(source.text(kernel)) == written


SOURCE = """
constexpr int kWide = Config::heads > 2 || Config::varlen ? (kCount == 2 ? 40 : 32) : 0;
constexpr int kCount = Config::heads / 2;
__device__ void rest() { x = 3; }
__device__ void release(Mbarrier& barrier) {
  if (lane == 0) ptx::mbarrier_arrive(barrier);
}
__device__ void role(Smem& smem) {
  int left = 4;
  float sum = 0.0f;
  while (left > 0) {
    if (sum > 1.0f) {
      sum = 0.0f;
    }
    if (skipped()) continue;
    release(smem.empty[i]);
    left -= 2;
  }
}
void start() {
  ptx::mbarrier_init(smem.full_k[i], 1);
  for (int i = 0; i < 2; ++i) ptx::mbarrier_init(rows(smem, i).empty, 4 * kCount + Config::varlen);
}
"""


@pytest.mark.parametrize(
    ("heads", "varlen", "wide"), [(4, False, 40), (2, True, 32), (2, False, 0)]
)
def test_constants_and_counts(heads, varlen, wide):
    constants = source.Constants(SOURCE, types.SimpleNamespace(heads=heads, varlen=varlen))
    assert dict(constants) == {"kWide": wide, "kCount": heads // 2}
    counts = source.arrivals(SOURCE, constants)
    assert counts == {"full_k": 1, "rows.empty": 2 * heads + varlen}


def test_a_skeleton_has_what_others_wait_for():
    assert source.skeleton(SOURCE) == [
        "__device__ void release(Mbarrier& barrier) {",
        "  if (lane == 0) ptx::mbarrier_arrive(barrier);",
        "}",
        "__device__ void role(Smem& smem) {",
        "  int left = 4;",
        "  while (left > 0) {",
        "    if (skipped()) continue;",
        "    release(smem.empty[i]);",
        "    left -= 2;",
        "  }",
        "}",
    ]


def test_a_skeleton_does_not_see_arithmetic():
    other = SOURCE.replace("sum = 0.0f;", "sum *= 2.0f; y = f(sum);")
    assert source.skeleton(other) == source.skeleton(SOURCE)
    for change in (("left -= 2", "left -= 1"), ("left > 0", "left > 1"), ("continue", "break")):
        assert source.skeleton(SOURCE.replace(*change)) != source.skeleton(SOURCE)
