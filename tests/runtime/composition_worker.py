"""One rank of the composition tests on gloo: arguments KIND LAYOUT PLAN, again and again."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from autopar.runtime.groups import leave
from tests.runtime.composition import compile_layout, errors, expected


def main() -> None:
    arguments, found = sys.argv[1:], []
    for start in range(0, len(arguments), 3):
        kind, layout, plan = arguments[start : start + 3]
        run, batch = compile_layout(kind, layout, plan=plan)
        found.append(errors(run, batch, expected(kind, "cp=" in layout)))
    Path(os.environ["RESULT"]).write_text(json.dumps(found))
    leave()


if __name__ == "__main__":
    main()
