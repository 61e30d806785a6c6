"""How much each request of a batch may speculate: K shrinks as the batch fills, to 0 if need be."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from specexport.contract.manifest import Manifest
from specexport.contract.shapes import window
from specexport.contract.tree import TokenTree
from specexport.runtime.acceptance import KEEP_OF_ALL, PRIOR, Acceptance, History
from specexport.runtime.choice import Fit, Option, best
from specexport.runtime.costs import Costs
from specexport.runtime.program import PLAIN_TREE, Outcome, Speculation, StepResult
from specexport.runtime.proposal import SlotView
from specexport.runtime.reader import common_prefix
from specexport.runtime.request import Request

LookUp = Callable[[str, SlotView], Sequence[int]]
"""What a method that finds draft tokens in text would propose for a slot."""
MARGIN = 1.03
"""By how much speculation must promise to be faster than plain decoding: costs are not exact."""
LONGEST_REST = 4
"""Most plain steps in a row without asking again what pays: asking takes 0.2 to 0.4 ms."""
PROBE_SHARE = 0.005
"""The share of time that trying to speculate again may cost where it did not pay."""
READ_SHARE = 0.01
"""The share beside it where a draft has to read what it missed first."""
_STEPS_AHEAD = 64
"""Most steps that what a draft reads is expected to be of use in."""
_TOKENS_A_STEP = 3
"""That such a step is taken to commit."""


class SpeculationPolicy:
    """Chooses the tree each request verifies in a step, by a rule.

    A request alone gets what it asked for. In a batch its share of a step is what its method's default tree, made for
    one, would be for each of them: so a step verifies hardly more tokens than the bundle was built to verify at once.
    """

    def __init__(self, manifest: Manifest, speculations: Mapping[str, Speculation]) -> None:
        self._tokens = {name: len(one.method.token_trees()[0]) for name, one in speculations.items()}
        self._smaller = {name: one.method.smaller_trees(manifest.target) for name, one in speculations.items()}

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None:
        """Sets the tree of each request's next step, soon after which so many others are to join them."""
        for request in requests:
            # The last token of an output needs no draft.
            request.view.tree = PLAIN_TREE if request.room <= 1 else self._share(request, len(requests))

    def learn(self, requests: Sequence[Request], step: StepResult, seconds: float) -> None:
        """Takes in what the step did that the last :meth:`assign` was for, and how long it took, proposing included; a
        rule learns nothing.
        """

    def _share(self, request: Request, others: int) -> TokenTree:
        method = request.view.method
        if method is None or others == 1:
            return request.tree
        nodes = min(self._tokens[method] // others, len(request.tree))
        return next((tree for tree in self._smaller[method] if len(tree) <= nodes), PLAIN_TREE)


class MeasuredPolicy(SpeculationPolicy):
    """Chooses the trees that are expected to commit most tokens a second on this machine.

    What is expected to be accepted comes from the request's own steps so far, at first from those of earlier requests;
    what a step costs comes from what was measured, refined by how long such steps took since. What a draft has to read
    first is spread over the steps that are left. While others join, a step has to be faster than plain decoding of them
    all: what it saves is worth no more, once they are there. All slots of a step pay for the widest tree among them,
    and those of one method for its largest: see :func:`best`. A request alone that named its number of draft tokens
    gets it.

    A request that named no method has draft tokens looked up in its text where that promises more than its own method.
    What is found is compared with what the step then says, taken or not, so that how often it comes true is known at
    all times.

    Where nothing pays, the next steps are plain without asking again: one, then three, then ``LONGEST_REST`` of them.

    Where a method is left out, ``PROBE_SHARE`` of the time is saved up, with a draft ``READ_SHARE`` too, and spent on
    trying its smallest tree. What is accepted pays back, so that a try that succeeds is followed by
    the next.

    Attributes:
        look_up: finds draft tokens in a text; nothing until it is set.
    """

    def __init__(
        self, manifest: Manifest, speculations: Mapping[str, Speculation], costs: Costs, sizes: Sequence[int]
    ) -> None:
        super().__init__(manifest, speculations)
        self.look_up: LookUp = lambda *_: ()
        self._speculations = speculations
        self._costs = costs
        self._sizes = sizes
        self._chunk = manifest.prefill_chunk
        points = manifest.target.graph.points
        self._caches = sorted({point.cache for point in points})
        self._widths = sorted({point.tokens for point in points if point.rows == point.tokens})
        self._fits = {name: [self._fit(name, tree) for tree in self._smaller[name]] for name in speculations}
        self._chosen: dict[Request, Fit] = {}
        self._idle: list[_Idle] = []
        self._found: dict[Request, Sequence[int]] = {}
        self._gained: dict[tuple[Request, str, int], list[tuple[float, Fit]]] = {}
        self._size, self._rows = 1, 1
        self._rest, self._resting = _Rest(), False
        self._everyone = History(keep=KEEP_OF_ALL)
        self._saved: dict[str, float] = {}

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None:
        self._chosen, self._found, self._gained = {}, {}, {}
        for request in requests:
            request.view.lookup = None
        self._resting = self._rest.covers(requests, joining)
        if self._resting:
            for request in requests:
                request.view.tree = PLAIN_TREE
            return
        self._idle = []
        # As many as the cache will have.
        self._rows = _at_least(self._caches, max(len(request.view.tokens) for request in requests))
        self._size = self._batch(requests)
        if len(requests) == 1 and requests[0].fixed:
            super().assign(requests)
            for request in requests:
                if request.view.method is not None and len(request.view.tree) > 1:
                    self._chosen[request] = self._fit(request.view.method, request.view.tree)
            return
        verify = cache(self._verify)
        coming = len(requests) + joining
        plain = len(requests) / verify(1)
        if joining:
            plain = max(plain, coming / self._costs.step(_at_least(self._sizes, coming), 1, self._rows))
        groups: dict[str, list[Request]] = {}
        for request in requests:
            # The last token of an output needs no draft.
            if request.view.method is not None and len(request.tree) > 1 and request.room > 1:
                groups.setdefault(request.view.method, []).append(request)
        if groups:
            self._choose(groups, requests, plain * MARGIN, verify)
        for request in requests:
            fit = self._chosen.get(request)
            request.view.tree = PLAIN_TREE if fit is None else fit.tree
        self._rest.follow(requests, joining, plain=not self._chosen and not any(self._found.values()))

    def _verify(self, width: int) -> float:
        """Seconds of the step with trees of at most this width, without proposing."""
        return self._costs.step(self._size, _at_least(self._widths, width), self._rows)

    def _choose(
        self,
        groups: Mapping[str, list[Request]],
        requests: Sequence[Request],
        least: float,
        verify: Callable[[int], float],
    ) -> None:
        rate, picks = best([self._options(*group) for group in groups.items()], len(requests), least, verify)
        regrouped: dict[str, list[Request]] = {}
        for name, members in groups.items():
            for request in members:
                request.view.lookup = self._better_lookup(request, rate, verify)
                regrouped.setdefault(request.view.lookup or name, []).append(request)
        if regrouped != groups:
            groups = regrouped
            _, picks = best([self._options(*group) for group in groups.items()], len(requests), least, verify)
        width = max((pick.width for pick in picks if pick is not None), default=1)
        for (name, members), pick in zip(groups.items(), picks, strict=True):
            if pick is not None:
                self._chosen |= pick.fits
            elif members[0].view.lookup is None:
                self._idle.append(self._idling(name, members, width, len(requests), verify))
        tried = next((idle for idle in self._idle if self._saved.get(idle.name, 0.0) >= idle.cost), None)
        if tried is not None:
            tried.trying = True
            self._chosen |= tried.fits

    def _better_lookup(self, request: Request, rate: float, verify: Callable[[int], float]) -> str | None:
        """The method that is to look draft tokens up in a request's text, where that is worth more than its own.

        Args:
            request: one that speculates.
            rate: tokens a second that the step commits without look-ups, which is what its time is worth.
            verify: seconds of a step of some width.
        """
        name, own = request.lookup, request.view.method
        if name is None or own is None:
            return None
        request.view.tree = self._fits[name][0].tree  # the longest that is asked for
        found = self._found[request] = self.look_up(name, request.view)

        def worth(method: str, fits: Sequence[Fit]) -> float:
            """Tokens that it is expected to add to the step, less those that its time is worth."""
            return max(
                gain - rate * (verify(fit.width) - verify(1) + self._costs.propose(method, 1, fit.nodes))
                for gain, fit in self._gains(request, method, fits)
            ) - rate * self._read(method, request)

        fitting = [fit for fit in self._fits[name] if fit.nodes <= len(found) + 1]
        return name if fitting and worth(name, fitting) > max(0.0, worth(own, self._within(own, request))) else None

    def _options(self, name: str, members: Sequence[Request]) -> list[Option]:
        """What a method may do in a step: one option for each limit on the width of its trees."""
        gains = {request: self._gains(request, name, self._within(name, request)) for request in members}
        batch = self._batch(members)
        reading = {request: self._read(name, request) for request in members}
        by_width: dict[int, list[tuple[Request, tuple[float, Fit]]]] = {}
        for request, known in gains.items():
            for pair in known:
                by_width.setdefault(pair[1].width, []).append((request, pair))
        found = []
        most: dict[Request, tuple[float, Fit]] = {}
        for width in sorted(by_width):
            for request, pair in by_width[width]:
                if request not in most or pair[0] >= most[request][0]:
                    most[request] = pair
            fits = {request: fit for request, (_, fit) in most.items()}
            nodes = max(fit.nodes for fit in fits.values())
            seconds = self._costs.propose(name, batch, nodes) + sum(reading[request] for request in fits)
            found.append(Option(width, sum(gain for gain, _ in most.values()), seconds, fits))
        return found

    def _idling(
        self, name: str, members: list[Request], width: int, running: int, verify: Callable[[int], float]
    ) -> _Idle:
        """What it takes to try a method that was left out of a step of some width."""
        read = self._costs.read(name)
        # A draft reads what it has missed, so one request tries it at a time: where that is least.
        trying = [min(members, key=lambda request: request.history.unread)] if read else members
        fits = {request: self._within(name, request)[-1] for request in trying}
        wider = max(width, *(fit.width for fit in fits.values()))
        nodes = max(fit.nodes for fit in fits.values())
        cost = verify(wider) - verify(width) + self._costs.propose(name, self._batch(fits), nodes)
        cost += sum(self._read(name, request, once=True) for request in trying)
        share = PROBE_SHARE + (READ_SHARE if read else 0.0)
        return _Idle(name, fits, cost, read, verify(1) / running, share * verify(width) * len(members) / running)

    def _within(self, name: str, request: Request) -> list[Fit]:
        """The trees a request may verify, those of at most the size it asked for or has found, the largest first."""
        most = len(request.tree) if request.view.lookup is None else len(self._found[request]) + 1
        return [fit for fit in self._fits[name] if fit.nodes <= most]

    def _batch(self, requests: Collection[Request]) -> int:
        return len(window([request.view.slot for request in requests], self._sizes))

    def _read(self, name: str, request: Request, *, once: bool = False) -> float:
        """Seconds of reading what a draft has missed of a request: a step's share of it, or all."""
        read, unread = self._costs.read(name), request.history.unread
        if not read or not unread:
            return 0.0
        beside = min(unread, self._speculations[name].proposer.reads_along)
        chunks = math.ceil((unread - beside) / self._chunk) + beside / self._chunk
        return read * chunks / (1.0 if once else min(max(request.room / _TOKENS_A_STEP, 1.0), _STEPS_AHEAD))

    def _acceptance(self, request: Request, method: str | None, alike: int) -> tuple[Acceptance, Acceptance]:
        """What is known of a request, and of all of about its temperature: the higher that is, the less is accepted."""
        heat = 0.0 if request.view.params.greedy else min(request.view.params.temperature, 2.0)
        everyone = self._everyone.acceptance(method, (alike, round(2 * heat)), prior=PRIOR / max(1.0, heat))
        return request.history.acceptance(method, alike, everyone), everyone

    def _gains(self, request: Request, method: str, fits: Sequence[Fit]) -> list[tuple[float, Fit]]:
        """Draft tokens of each tree that are expected to be accepted; what is beyond the output's end is none."""
        key = request, method, len(fits)
        if key not in self._gained:
            self._gained[key] = self._expected(request, method, fits)
        return self._gained[key]

    def _expected(self, request: Request, method: str, fits: Sequence[Fit]) -> list[tuple[float, Fit]]:
        deepest: dict[int, int] = {}
        for fit in fits:
            deepest[fit.alike] = max(fit.depth, deepest.get(fit.alike, 0))
        known = {alike: self._acceptance(request, method, alike)[0].by_depth(deep) for alike, deep in deepest.items()}
        most = request.room - 1.0
        return [(min(known[fit.alike][fit.depth], most), fit) for fit in fits]

    def _fit(self, name: str, tree: TokenTree) -> Fit:
        width, nodes = self._speculations[name].method.beside + len(tree), len(tree)
        return Fit(tree, width, nodes, tree.depth, 0 if tree.is_chain else nodes)

    def learn(self, requests: Sequence[Request], step: StepResult, seconds: float) -> None:
        made = dict(zip(requests, step.outcomes, strict=True))
        self._refine(made, step.propose, seconds - step.propose)
        for request, outcome in made.items():
            fit, history = self._chosen.get(request), request.history
            if (found := self._found.get(request)) and request.lookup is not None:
                right = common_prefix(found, outcome.tokens)
                known = min(len(found), right + (right < len(outcome.tokens)))  # what comes after the step is not
                for acceptance in self._acceptance(request, request.lookup, 0):
                    acceptance.learn(known, right)
            if fit is None or request.view.lookup is not None:
                history.unread += len(outcome.tokens)
            elif outcome.drafted or fit.windowed:
                for acceptance in self._acceptance(request, request.view.method, fit.alike):
                    acceptance.learn(outcome.depth or fit.depth, outcome.accepted)
                history.unread = 0
            else:
                history.unread = max(0, history.unread - self._chunk) + len(outcome.tokens)
        for idle in self._idle:
            self._saved[idle.name] = idle.settled(self._saved.get(idle.name, 0.0), made)

    def _refine(self, made: Mapping[Request, Outcome], proposing: float, verifying: float) -> None:
        """Takes in a step's times, unless it was not as chosen, or a draft read what it had missed."""
        if self._resting:
            return
        as_chosen = (made[request].drafted or fit.windowed for request, fit in self._chosen.items())
        if not all(as_chosen):
            return
        width = _at_least(self._widths, max((fit.width for fit in self._chosen.values()), default=1))
        self._costs.refine(None, self._size, width, self._verify(width), verifying)
        methods = {request.view.lookup or request.view.method for request in self._chosen}
        if len(methods) == 1 and not any(request.history.unread for request in self._chosen):
            method, batch = methods.pop() or "", self._batch(self._chosen)
            nodes = max(fit.nodes for fit in self._chosen.values())
            self._costs.refine(method, batch, nodes, self._costs.propose(method, batch, nodes), proposing)


def _at_least(sizes: Sequence[int], wanted: int) -> int:
    """The smallest of ascending sizes that is large enough, or the largest."""
    return next((size for size in sizes if size >= wanted), sizes[-1])


class _Rest:
    """Plain steps that follow one in which nothing paid, without asking again: the more, the more such there were."""

    def __init__(self) -> None:
        self._requests: Sequence[Request] = ()
        self._left = self._last = 0

    def covers(self, requests: Sequence[Request], joining: int) -> bool:
        """Whether the next step is one of them, which it is not for other requests."""
        covered = self._left > 0 and not joining and requests == self._requests
        self._left -= covered
        return covered

    def follow(self, requests: Sequence[Request], joining: int, plain: bool) -> None:
        """Takes in what was found for a step: whether that is plain, and nothing was found to be looked up."""
        again = plain and requests == self._requests
        self._left = self._last = min(2 * self._last + 1, LONGEST_REST) if again else 0
        self._requests = () if joining else list(requests)


@dataclass
class _Idle:
    """A method that a step leaves out.

    Attributes:
        name: its name.
        fits: what is tried.
        cost: seconds that this would add to the step, reading included.
        read: seconds of a chunk that its draft is behind in.
        token: seconds that a token takes in plain decoding.
        income: seconds that are saved up in the step.
        trying: whether the step tries it nevertheless.
    """

    name: str
    fits: Mapping[Request, Fit]
    cost: float
    read: float
    token: float
    income: float
    trying: bool = False

    def settled(self, saved: float, made: Mapping[Request, Outcome]) -> float:
        """What is saved up after a step: a try takes what it cost and gives what it was worth."""
        if self.trying:
            verified = any(made[request].drafted or fit.windowed for request, fit in self.fits.items())
            accepted = sum(made[request].accepted for request in self.fits)
            saved += accepted * self.token - (self.cost if verified else self.read)
        return min(saved + self.income, self.cost)
