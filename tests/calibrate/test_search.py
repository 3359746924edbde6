"""The search over candidates, on made-up rates whose optimum is known."""

from aspire.calibrate.search import Candidate, Search, places_of

WORTH = {2: 3.0, 5: 4.0, 9: 1.0, 11: -2.0}  # tokens per second that a layer adds, alone


def rate(candidate: Candidate) -> float:
    """Layers cost 1.5 each; 5 and 2 together are worth 1 more; the best budget is 512."""
    worth = sum(WORTH[layer] - 1.5 for layer in candidate.refresh) + (1.0 if {2, 5} <= set(candidate.refresh) else 0.0)
    return 100.0 + worth - abs(candidate.budget - 512) / 256


def test_growth_finds_the_best_set_and_measures_nothing_twice() -> None:
    """Planted faults: growth from the best set instead of the running one after a miss; candidates measured again."""
    seen: list[Candidate] = []

    def measure(candidate: Candidate) -> float:
        seen.append(candidate)
        return rate(candidate)

    search = Search(measure)
    search.grow(Candidate((), 256), tuple(WORTH), most=4)
    assert search.best == Candidate((2, 5), 256)
    search.vary_budget(search.best, (128, 256, 512, 1024))
    assert search.best == Candidate((2, 5), 512)
    search.thin(Candidate((2, 5, 9, 11), 512))
    assert search.best == Candidate((2, 5), 512)
    assert len(seen) == len(set(seen))
    assert not search.out_of_time


def test_two_layers_that_pay_only_together_are_found() -> None:
    """One miss is forgiven. Planted fault: PATIENCE 0."""
    rates = {(): 10.0, (1,): 9.9, (2,): 9.8, (1, 2): 12.0}
    search = Search(lambda candidate: rates[candidate.refresh])
    search.grow(Candidate((), 64), (1, 2), most=2)
    assert search.best.refresh == (1, 2)


def test_time_running_out_keeps_what_was_measured() -> None:
    """Planted fault: the unmeasured candidate kept with rate 0."""
    left = [4]

    def measure(candidate: Candidate) -> float | None:
        left[0] -= 1
        return rate(candidate) if left[0] >= 0 else None

    search = Search(measure)
    search.grow(Candidate((), 256), tuple(WORTH), most=4)
    search.vary_budget(search.best, (128, 256, 512))
    assert search.out_of_time
    assert len(search.rates) == 4
    assert left[0] == -1  # asked once in vain, not for every further candidate
    assert search.best == Candidate((5,), 256)


def test_places_are_inside_and_spread() -> None:
    """Planted fault: the last layer among them."""
    assert places_of(range(30), 7) == (3, 7, 11, 15, 19, 23, 27)
    assert places_of((0, 5, 11, 17), 7) == (5, 11)
    assert places_of(range(2), 7) == ()


def test_only_the_most_promising_of_each_size_are_measured() -> None:
    """Planted fault: the least promising first."""
    seen: list[tuple[int, ...]] = []

    def measure(candidate: Candidate) -> float:
        seen.append(candidate.refresh)
        return 10.0 + len(candidate.refresh) if len(candidate.refresh) < 2 else 0.0

    Search(measure).grow(Candidate((), 64), range(8), most=2, promise=lambda one: sum(one.refresh), width=2)
    assert seen == [(), (7,), (6,), (6, 7), (5, 7)]


def test_the_best_measured_again_decide() -> None:
    """The best of a short measurement were lucky. Planted faults: the first rates decide; a single one measured again
    beats the rest unseen."""
    first = {(): 10.0, (1,): 14.0, (2,): 12.0, (3,): 11.0}
    again = {(1,): 9.0, (2,): 10.5, (3,): 10.0}
    search = Search(lambda candidate: first[candidate.refresh])
    search.try_all([Candidate(refresh, 64) for refresh in first])
    search.confirm(lambda candidate: again[candidate.refresh], 3)
    assert search.best.refresh == (2,)
    assert not search.out_of_time
    late = Search(lambda candidate: first[candidate.refresh])
    late.try_all([Candidate(refresh, 64) for refresh in first])
    late.confirm(lambda candidate: again.get(candidate.refresh) if candidate.refresh == (1,) else None, 3)
    assert late.best.refresh == (2,)
    assert late.out_of_time
