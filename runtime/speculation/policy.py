"""Decides how much each request of a step speculates: K shrinks as the batch fills, to 0 if need be."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from specexport.contract.manifest import Manifest
from specexport.contract.shapes import CATCH_UP_TOKENS, window
from specexport.contract.tree import TokenTree
from specexport.runtime.proposal import PLAIN_TREE, Proposer, SlotView, TextProposer
from specexport.runtime.speculation.acceptance import KEEP_OF_ALL, PRIOR, Acceptance, History
from specexport.runtime.speculation.choice import Fit, Option, best_options
from specexport.runtime.speculation.costs import Costs, StepCosts, at_least
from specexport.runtime.speculation.probing import MAX_PLAIN_STEPS, Pause, Probe
from specexport.runtime.step import Outcome, StepResult
from specexport.runtime.text import common_prefix

if TYPE_CHECKING:
    from specexport.runtime.request import Request

MARGIN, LEAVING_MARGIN = 1.03, 0.97
"""Speed-up over plain decoding that speculation must promise to begin, as costs are inexact; and to continue, as
resuming it costs the reading of text that the draft missed, and texts tend to become more predictable."""
TRIAL_MARGIN, TRIAL_STEPS = 0.9, 4
"""The speed-up that is enough for requests with fewer steps of their method. A trial costs little. Without trials, a
batch once judged by its worst requests, which are the last to end, would never speculate again."""
_TRIAL_READING = 0.05
"""Largest share of a request's remaining time in plain decoding that its draft may take to read for a trial."""
PROBE_SHARE = 0.005
"""Share of the time that probes of methods that do not pay may take."""
READ_SHARE = 0.01
"""Additional share for drafts, which first read the text that they missed."""
_DECISION, _DECISION_SHARE, _LONGEST_PAUSE = 1e-4, 0.01, 32
"""Typical seconds of a decision; the share of the time that decisions may take while nothing pays, which matters only
if steps are short; and the most steps without one."""
_STEPS_AHEAD = 64
"""Most steps over which the cost of a draft's reading is spread."""


class SpeculationPolicy:
    """Chooses the tree that each request verifies in a step, by a fixed rule.

    A single request gets the tree that it asked for. In a batch, the size of its method's default tree is divided by
    the number of requests, so that a step verifies hardly more tokens than the bundle was built to verify at once.
    """

    def __init__(self, manifest: Manifest, proposers: Mapping[str, Proposer]) -> None:
        self._default_nodes = {name: len(p.method.token_trees()[0]) for name, p in proposers.items()}
        self._trees = {name: p.method.smaller_trees(manifest.target) for name, p in proposers.items()}

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None:
        """Sets the tree of each request's next step; ``joining`` more requests are about to join."""
        for request in requests:
            # The last token of an output needs no draft.
            request.view.tree = PLAIN_TREE if request.remaining <= 1 else self._share(request, len(requests))

    def learn(self, requests: Sequence[Request], step: StepResult, seconds: float) -> None:
        """Learns from the step after :meth:`assign`, which took ``seconds`` with proposing; a rule does not."""

    def _share(self, request: Request, running: int) -> TokenTree:
        method = request.view.method
        if method is None or running == 1:
            return request.tree
        nodes = min(self._default_nodes[method] // running, len(request.tree))
        return next((tree for tree in self._trees[method] if len(tree) <= nodes), PLAIN_TREE)


class MeasuredPolicy(SpeculationPolicy):
    """Chooses the trees that are expected to commit most tokens a second on this machine.

    The expected acceptance comes from the request's own steps, at first from those of earlier requests. The costs of
    steps are measured, and refined by the times of later steps. The cost of text that a draft must read first is spread
    over the remaining steps. While requests join, a step has to beat plain decoding of all of them, as it delays them.
    All slots of a step pay for the widest tree among them, and those of one method for its largest: see
    :func:`best_options`. A single request that set its number of draft tokens gets it.

    A request that names no method uses look-ups in its text when they promise more than its own method. Looked-up
    tokens are compared with the step's outcome even if they were not used, so that their acceptance is always known.

    After a decision that nothing pays, some steps are plain without another decision
    (:class:`~specexport.runtime.speculation.probing.Pause`). If plain steps take less than 2 ms, as on GPUs, the pause
    is longer; it ends early when look-ups that had found nothing find something.

    While a method is left out, a budget for probing it grows by ``PROBE_SHARE`` of the time, for a draft by
    ``READ_SHARE`` more, and is spent on its smallest tree. Accepted tokens are paid back, so that a successful probe is
    followed by another.
    """

    def __init__(
        self, manifest: Manifest, proposers: Mapping[str, Proposer], costs: Costs, sizes: Sequence[int]
    ) -> None:
        super().__init__(manifest, proposers)
        self._proposers = proposers
        self._costs = costs
        self._sizes = sizes
        self._chunk = manifest.prefill_chunk
        points = manifest.target.graph.points
        self._widths = sorted({point.tokens for point in points if point.rows == point.tokens})
        self._fits = {name: [self._fit(name, tree) for tree in self._trees[name]] for name in proposers}
        self._everyone = History(keep=KEEP_OF_ALL)
        # The last decision.
        self._chosen: dict[Request, Fit] = {}
        self._probes: list[Probe] = []
        self._looked_up: dict[Request, Sequence[int]] = {}
        self._gained: dict[tuple[Request, str, int], list[tuple[float, Fit]]] = {}
        self._step = StepCosts(costs, self._widths, batch=1, text=1)
        # Between decisions.
        self._last_shape = 1, 1  # batch size and width of the last step
        self._pause = Pause()
        self._found = False  # whether look-ups found something in the last decision
        self._budgets: dict[str, float] = {}

    def assign(self, requests: Sequence[Request], joining: int = 0) -> None:
        self._chosen, self._looked_up, self._gained = {}, {}, {}
        for request in requests:
            request.view.lookup = None
        if not self._pause.covers(requests, joining, lambda: self._found or not self._repeats(requests)):
            self._decide(requests, joining)
        for request in requests:
            fit = self._chosen.get(request)
            request.view.tree = PLAIN_TREE if fit is None else fit.tree

    def _decide(self, requests: Sequence[Request], joining: int) -> None:
        self._probes = []
        longest = max(len(request.view.tokens) for request in requests)
        self._step = StepCosts(self._costs, self._widths, self._batch(requests), longest)
        groups: dict[str, list[Request]] = {}
        for request in requests:
            # The last token of an output needs no draft.
            if request.view.method is not None and len(request.tree) > 1 and request.remaining > 1:
                groups.setdefault(request.view.method, []).append(request)
        if len(requests) == 1 and requests[0].fixed:
            self._chosen = {request: self._fit(name, request.tree) for name, (request,) in groups.items()}
            return
        plain = len(requests) / self._step.verify(1)
        if joining:
            coming = len(requests) + joining
            together = StepCosts(self._costs, self._widths, at_least(self._sizes, coming), longest)
            plain = max(plain, coming / together.verify(1))
        if groups:
            margins = [self._margin(request, len(requests)) for request in requests]
            self._choose(groups, requests, plain * sum(margins) / len(margins))
        most_plain = min(int(_DECISION / (_DECISION_SHARE * self._step.verify(1))), _LONGEST_PAUSE)
        self._found = any(self._looked_up.values())
        # In a batch, tokens found for one request seldom pay, and to decide takes longer; so every other step decides.
        most = MAX_PLAIN_STEPS if not self._found or most_plain > MAX_PLAIN_STEPS else int(len(requests) > 1)
        self._pause.follow(requests, joining, 0 if self._chosen else most, most_plain)

    def look_up(self, method: str, view: SlotView) -> Sequence[int]:
        """The draft tokens that a method would look up for a slot; none of a method that proposes otherwise."""
        proposer = self._proposers[method]
        return proposer.ahead(view) if isinstance(proposer, TextProposer) else ()

    def _repeats(self, requests: Sequence[Request]) -> bool:
        """Whether look-ups find draft tokens for any of the requests."""
        for request in requests:
            name = request.lookup or request.view.method
            if name is not None:
                request.view.tree = self._fits[name][0].tree  # the longest to look up
                if self.look_up(name, request.view):
                    return True
        return False

    def _margin(self, request: Request, running: int) -> float:
        """The speed-up that speculation must promise for a request."""
        method = request.view.method
        if method is not None and request.history.speculated < TRIAL_STEPS:
            remaining = request.remaining * self._step.verify(1) / running
            if self._read(method, request) <= _TRIAL_READING * remaining:
                return TRIAL_MARGIN
        return MARGIN if request.history.unread else LEAVING_MARGIN

    def _choose(self, groups: Mapping[str, list[Request]], requests: Sequence[Request], least: float) -> None:
        """Chooses the trees of a step that has to commit more than ``least`` tokens a second, and perhaps a probe.

        ``groups`` are the requests of each method.
        """

        def best() -> tuple[float, tuple[Option | None, ...]]:
            options = [self._options(name, members) for name, members in groups.items()]
            return best_options(options, len(requests), least, self._step.verify)

        rate, picks = best()
        regrouped: dict[str, list[Request]] = {}
        for name, members in groups.items():
            for request in members:
                request.view.lookup = self._better_lookup(request, rate, len(requests))
                regrouped.setdefault(request.view.lookup or name, []).append(request)
        if regrouped != groups:
            groups = regrouped
            _, picks = best()
        width = max((pick.width for pick in picks if pick is not None), default=1)
        for (name, members), pick in zip(groups.items(), picks, strict=True):
            if pick is not None:
                self._chosen |= pick.fits
            elif members[0].view.lookup is None:
                self._probes.append(self._probe(name, members, width, len(requests)))
        probe = next((probe for probe in self._probes if self._budgets.get(probe.method, 0.0) >= probe.cost), None)
        if probe is not None:
            probe.chosen = True
            self._chosen |= probe.fits

    def _better_lookup(self, request: Request, rate: float, running: int) -> str | None:
        """The look-up method for a request; None if its own method's draft tokens are worth at least as much.

        ``rate`` is the tokens a second that the ``running`` requests commit without look-ups: the value of time.
        """
        name, method = request.lookup, request.view.method
        if name is None or method is None:
            return None
        request.view.tree = self._fits[name][0].tree  # the longest to look up
        tokens = self._looked_up[request] = self.look_up(name, request.view)

        fitting = [fit for fit in self._fits[name] if fit.nodes <= len(tokens) + 1]
        if not fitting:
            return None
        worth = self._worth(request, name, fitting, rate, running)
        better = worth > 0.0 and worth > self._worth(request, method, self._within(method, request), rate, running)
        return name if better else None

    def _worth(self, request: Request, method: str, fits: Sequence[Fit], rate: float, running: int) -> float:
        """Tokens that the best of the trees is expected to add to the step, less the value of its time."""
        reading, batch = rate * self._read(method, request), self._sizes[0]  # of a device all slots
        return max(
            gain
            - rate * self._step.added(method, fit.width, fit.nodes, batch, running)
            - (reading / _steps(request, gain) if reading else 0.0)
            for gain, fit in self._gains(request, method, fits)
        )

    def _options(self, name: str, members: Sequence[Request]) -> list[Option]:
        """A method's options in a step: one for each limit on the width of its trees."""
        batch = self._batch(members)
        reading = {request: seconds for request in members if (seconds := self._read(name, request))}
        by_width: dict[int, list[tuple[Request, float, Fit]]] = {}
        for request in members:
            for gain, fit in self._gains(request, name, self._within(name, request)):
                by_width.setdefault(fit.width, []).append((request, gain, fit))
        options = []
        gains: dict[Request, float] = {}
        fits: dict[Request, Fit] = {}
        for width in sorted(by_width):
            for request, gain, fit in by_width[width]:
                if gain >= gains.get(request, 0.0):
                    gains[request], fits[request] = gain, fit
            nodes = max([fit.nodes for fit in fits.values()])
            seconds = self._costs.propose(name, batch, nodes)
            if reading:
                seconds += sum(read / _steps(request, gains[request]) for request, read in reading.items())
            options.append(Option(width, sum(gains.values()), seconds, fits.copy()))
        return options

    def _probe(self, name: str, members: list[Request], width: int, running: int) -> Probe:
        """The probe of a method that was left out of a step of this width."""
        read = self._costs.read(name)
        # A draft reads the text that it missed, so only the request that missed least takes part.
        probing = [min(members, key=lambda request: request.history.unread)] if read else members
        fits = {request: self._within(name, request)[-1] for request in probing}
        wider = max(width, *(fit.width for fit in fits.values()))
        nodes = max(fit.nodes for fit in fits.values())
        cost = self._step.verify(wider) - self._step.verify(width) + self._costs.propose(name, self._batch(fits), nodes)
        cost += sum(self._read(name, request) for request in probing)
        share = PROBE_SHARE + (READ_SHARE if read else 0.0)
        income = share * self._step.verify(width) * len(members) / running
        return Probe(name, fits, cost, read, self._step.verify(1) / running, income)

    def _within(self, name: str, request: Request) -> list[Fit]:
        """The trees that a request may verify: at most as large as it asked for or looked up, the largest first."""
        most = len(request.tree) if request.view.lookup is None else len(self._looked_up[request]) + 1
        return [fit for fit in self._fits[name] if fit.nodes <= most]

    def _batch(self, requests: Collection[Request]) -> int:
        """The batch size of a run that includes these requests."""
        return len(window([request.view.slot for request in requests], self._sizes))

    def _read(self, name: str, request: Request) -> float:
        """Seconds in which a method's draft reads the text that it missed."""
        read, unread = self._costs.read(name), request.history.unread
        if not read or not unread:
            return 0.0
        # Any draft reads the last tokens along, which are not counted as unread.
        most = max(0, self._proposers[name].reads_along - CATCH_UP_TOKENS)
        along = min(unread, most)
        chunks = math.ceil((unread - along) / self._chunk) + along / self._chunk
        return read * chunks

    def _acceptance(self, request: Request, method: str | None, kind: int) -> Acceptance:
        """The acceptance of a request, at first that of all requests at about its temperature: the hotter, the less.

        ``kind`` is the acceptance class of the trees.
        """
        params = request.view.params
        heat = 0.0 if params.greedy else min(params.temperature, 2.0)
        everyone = self._everyone.acceptance(method, (kind, round(2 * heat)), prior=PRIOR / max(1.0, heat))
        return request.history.acceptance(method, kind, everyone)

    def _gains(self, request: Request, method: str, fits: Sequence[Fit]) -> list[tuple[float, Fit]]:
        """The expected number of accepted draft tokens of each tree, up to the output's end."""
        key = request, method, len(fits)
        if key not in self._gained:
            most, pairs = request.remaining - 1.0, []
            expected: dict[int, Sequence[float]] = {}
            for fit in fits:  # the largest first, so the first of a class is its deepest
                kind = fit.acceptance_class
                if kind not in expected:
                    expected[kind] = self._acceptance(request, method, kind).expected(fit.depth)
                pairs.append((min(expected[kind][fit.depth], most), fit))
            self._gained[key] = pairs
        return self._gained[key]

    def _fit(self, name: str, tree: TokenTree) -> Fit:
        width, nodes = self._proposers[name].method.extra_nodes + len(tree), len(tree)
        return Fit(tree, width, nodes, tree.depth, 0 if tree.is_chain else nodes)

    def learn(self, requests: Sequence[Request], step: StepResult, seconds: float) -> None:
        outcomes = dict(zip(requests, step.outcomes, strict=True))
        self._refine(outcomes, step, seconds)
        for request, outcome in outcomes.items():
            fit, history = self._chosen.get(request), request.history
            if (tokens := self._looked_up.get(request)) and request.lookup is not None:
                matching = common_prefix(tokens, outcome.tokens)
                # Whether a token after the step's own would have been accepted is not known.
                depth = min(len(tokens), matching + (matching < len(outcome.tokens)))
                self._acceptance(request, request.lookup, 0).learn(depth, matching)
            if fit is None or request.view.lookup is not None:
                history.unread += len(outcome.tokens)
            elif outcome.drafted or fit.has_extra_nodes:
                acceptance = self._acceptance(request, request.view.method, fit.acceptance_class)
                acceptance.learn(outcome.depth or fit.depth, outcome.accepted)
                history.unread = 0
                history.speculated += 1
            else:
                history.unread = max(0, history.unread - self._chunk) + len(outcome.tokens)
        for probe in self._probes:
            self._budgets[probe.method] = probe.settle(self._budgets.get(probe.method, 0.0), outcomes)

    def _refine(self, outcomes: Mapping[Request, Outcome], step: StepResult, seconds: float) -> None:
        """Refines the costs by a step's times.

        Steps say nothing if they were not as chosen, or if a draft read text that it had missed. Nor do those after a
        step of another width: for some steps they take longer, and a plain step that looks expensive among wide ones
        would make these look cheap.

        If a draft proposed in the target's run, there is one time for both, which refines the cost of proposing.
        """
        as_chosen = (outcomes[request].drafted or fit.has_extra_nodes for request, fit in self._chosen.items())
        if not all(as_chosen):
            return
        width = self._step.width(max((fit.width for fit in self._chosen.values()), default=1))
        last, self._last_shape = self._last_shape, (self._step.batch, width)
        if last != self._last_shape:
            return
        verify = self._step.verify(width)
        if not step.fused:
            self._costs.refine(None, self._step.batch, width, verify, seconds - step.propose)
        methods = {request.view.lookup or request.view.method for request in self._chosen}
        if len(methods) == 1 and not any(request.history.unread for request in self._chosen):
            method, batch = methods.pop() or "", self._batch(self._chosen)
            nodes = max(fit.nodes for fit in self._chosen.values())
            propose = self._costs.propose(method, batch, nodes)
            expected, took = (verify + propose, seconds) if step.fused else (propose, step.propose)
            self._costs.refine(method, batch, nodes, expected, took)


def _steps(request: Request, gain: float) -> float:
    """The steps over which the cost of a draft's reading is spread, if each is expected to gain ``gain`` tokens."""
    return min(max(request.remaining / (1.0 + gain), 1.0), _STEPS_AHEAD)
