"""The times when a loss of a batch is compared with that of halves of its rows."""

from collections.abc import Hashable, Iterable

from torch import Tensor


class Checks:
    """Tells when a loss is compared with that of halves: the 1st, 2nd, 4th, 8th, ... time, when it
    has new terms, and when a sum is not zero for the first time. Numbers that may be values count
    too, by the times that they change.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._forms: set[Hashable] = set()
        self._places: dict[Hashable, set[int]] = {}  # The places of sums that were not zero.
        self._numbers: object = {()}
        self._changes = 0  # They are those of the numbers.
        # A sample of one row shows nothing, until there is another row.
        self.pending: list[object] = []
        # Reductions along the first dimension are sums of columns. None is unknown.
        self.has_columns: bool | None = None

    def tell_columns(self, *, are_some: bool) -> None:
        """Tells whether reductions along the first dimension are sums of columns."""
        self.has_columns = are_some

    def shows(self, form: Hashable, sums: Iterable[Tensor]) -> set[Hashable]:
        """Returns the places of sums that are not zero for the first time: zeros of halves show
        nothing. The host waits for those that have been zero so far.
        """
        places = self._places.setdefault(form, set())
        new = {
            place
            for place, value in enumerate(sums)
            if place not in places and value.detach().nan_to_num(0, 0, 0).any()
        }
        places |= new
        return {(form, place) for place in new}

    def are_due(self, form: Hashable, numbers: object = None) -> bool:
        """Counts a call. Returns True if statistics of this form and numbers are to be compared."""
        self._calls += 1
        is_new = form not in self._forms
        self._forms.add(form)
        if numbers != self._numbers:
            self._numbers = numbers
            self._changes += 1
            is_new = is_new or self._changes.bit_count() == 1
        return is_new or bool(self.pending) or self._calls.bit_count() == 1

    def postpone(self, samples: list[object]) -> None:
        """Makes the next comparison due, with these samples too."""
        self.pending = samples
        self._forms.clear()
        self._places.clear()

    def take(self, samples: list[object], *, of_one_row: bool) -> list[object]:
        """Returns samples with the one that was pending, or keeps that of one row."""
        samples = self.pending + samples
        waits = of_one_row and len(samples) == 1
        self.pending = samples if waits else []
        return [] if waits else samples
