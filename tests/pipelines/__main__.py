"""Writes down what the kernels' warps do to each other, after the models have been made to say the
same: ``python -m tests.pipelines``."""

from __future__ import annotations

from tests.pipelines.source import SKELETONS, skeleton, text


def main() -> None:
    """Write every skeleton into its file beside the models."""
    for kernel, path in SKELETONS.items():
        path.write_text("\n".join(skeleton(text(kernel))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
