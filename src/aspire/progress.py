"""Progress of long work: a bar on the terminal, or nothing."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], None]
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # (label, total) -> advance(count)


@contextmanager
def terminal_progress(label: str, total: int) -> Iterator[Advance]:
    """A rich progress bar on stderr, left out when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)


@contextmanager
def no_progress(label: str, total: int) -> Iterator[Advance]:
    """Silent."""
    yield lambda count: None
