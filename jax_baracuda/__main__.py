"""``python -m jax_baracuda report | check | race | demo``."""

from __future__ import annotations

import argparse
import importlib

from jax_baracuda._tools.command_line import CANNOT_RUN, INTERRUPTED, run

TOOLS = {
    "report": "what is installed, and what serves each op on each device here, and why",
    "check": "examples of every function against plain JAX on the devices here, value and gradient",
    "race": "time of this package against XLA on the devices here",
    "demo": "train a small graph network through gather_segment_max and compare with jax.ops",
}


def main() -> int:
    """Runs the tool that the command line names; returns its exit status."""
    tools = "\n".join(f"  {name:8}{purpose}" for name, purpose in TOOLS.items())
    parser = argparse.ArgumentParser(
        prog="python -m jax_baracuda",
        description=f"Tools of jax_baracuda:\n{tools}",
        epilog="Exit status: 0 if all is well; 1 if a tool finds that it is not (a wrong result, no device);\n"
        f"{CANNOT_RUN} if the tool could not run, and says why; {INTERRUPTED} if Ctrl-C interrupted it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tool", choices=TOOLS, metavar="tool", help="one of " + ", ".join(TOOLS))
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the tool; try --help")
    options = parser.parse_args()
    return importlib.import_module(f"jax_baracuda._tools.{options.tool}").main(options.arguments)


if __name__ == "__main__":
    run(main)
