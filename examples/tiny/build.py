"""Builds a tiny decoder with random weights: `python examples/tiny/build.py OUT --arch qwen2 --size tiny`."""

from __future__ import annotations

import argparse

from swift.models.tiny import ARCHS, HYBRIDS, MIXTURES, SIZES, VISION, build_tiny


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="where the model is written")
    parser.add_argument("--arch", choices=[*ARCHS, *HYBRIDS, *MIXTURES, *VISION], default="qwen2")
    parser.add_argument("--size", choices=list(SIZES), default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reward_model", action="store_true", help="a scalar head instead of a language model")
    args = parser.parse_args()
    print(build_tiny(args.folder, args.arch, args.size, args.seed, reward_model=args.reward_model))


if __name__ == "__main__":
    main()
