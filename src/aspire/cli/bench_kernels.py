"""`aspire bench kernels`: each operator against its byte floor, on the GPU of this machine."""

import json
from dataclasses import asdict

import typer


def kernels() -> None:
    """Check the attention operators, then time them; a table, then one JSON line per timing."""
    from aspire.bench.kernels import run, table

    try:
        timings = run()
    except RuntimeError as error:
        raise ValueError(str(error)) from None
    except AssertionError as error:
        print(f"refused: an operator is wrong: {error}")
        raise typer.Exit(1) from None
    print(table(timings))
    for timing in timings:
        print(json.dumps(asdict(timing)))
