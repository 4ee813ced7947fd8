"""While a run goes on: its plan is searched again where measured times have drifted, and changed if that pays."""

import subprocess
import time
from collections.abc import Callable

from realhf.base.code_files import python_command
from realhf.base.files import BadContentError, decode_json, read_bytes, write_atomically
from realhf.dataflow.plan import DIGEST_LENGTH, digest_in, plan_digest
from realhf.launch.local import start_child
from realhf.lifecycle.replan import Proposal
from realhf.lifecycle.request import ReplanRequest
from realhf.rundir.events import event_line, note
from realhf.rundir.lines import Tail, step_line
from realhf.rundir.paths import RunDirectory
from realhf.rundir.run import Run


class Replanner:
    """Answers the events `drift` that the master writes during one start of a run; `close` leaves no process.

    A process at idle priority searches the plan again. Mode "suggest" notes what it found; "switch" also asks the
    master to end after the next checkpoint, if a change pays, and gives the run that goes on from there.
    """

    def __init__(self, run: Run, directory: RunDirectory, request: ReplanRequest, say: Callable[[str], None]):
        self._run, self._directory, self._request, self._say = run, directory, request, say
        self._file = directory.launcher / "proposal.json"
        self._search: subprocess.Popen[bytes] | None = None
        self._proposal: Proposal | None = None
        self._is_due = False
        self._started_s = time.time()
        self._start_took_s: float | None = None
        self._step = run.spec.resume_step
        self._events = Tail(directory.events, event_line, say)
        self._metrics = Tail(directory.metrics, step_line, lambda _: None)  # the progress reports damaged lines

    def close(self) -> None:
        """Ends a search that goes on."""
        if self._search is not None:
            self._search.kill()
            self._search.wait()

    def poll(self) -> None:
        """To be called often. Does not wait."""
        for line in self._metrics.read():
            self._step = line["step"]
            if self._start_took_s is None and line["calls"]:
                self._start_took_s = min(call["start"] for call in line["calls"].values()) - self._started_s
        for event in self._events.read():
            if event.event == "drift":
                self._say(f"drift: {event.message}")
                self._is_due = self._request.mode != "off"
        if self._search is not None and self._search.poll() is not None:
            message, self._search = self._search_ended(self._search.returncode), None
            note(self._directory.events, "proposal", self._step, message)
            self._say(message)
        if self._is_due and self._search is None and self._proposal is None:
            self._is_due = False
            command = python_command("realhf.cli", "replan", str(self._directory.path), "--json", str(self._file))
            self._search = start_child(command, self._directory.log("replan"), is_idle=True)

    def next_run(self) -> Run:
        """The run under the plan that the master was asked to end for."""
        assert self._proposal is not None, "the master was not asked to end"
        found = self._proposal
        return self._run.changed(found.plan, call_factors=found.factors, changed_shares=found.changed_shares)

    def _search_ended(self, returncode: int) -> str:
        """The result of a search in words. Asks for the change if it pays."""
        if returncode:
            return f"the search for another plan failed; see {self._directory.log('replan')}"
        try:
            found = decode_json(read_bytes(self._file), Proposal)
        except (OSError, BadContentError) as error:
            return f"the search for another plan left no proposal in {self._file}: {error}"
        digest = plan_digest(found.plan)
        # The run goes back to no plan that it has had, or it would go to and fro.
        if digest in map(digest_in, self._directory.path.glob("plan*.json")):
            return f"plan {digest[:DIGEST_LENGTH]}, which the run has or has had, is still the best"
        steps_left, given_s = self._run.experiment.steps - self._step, self._request.switch_cost_s
        cost_s = given_s if given_s is not None else self._start_took_s or 0.0
        text = f"plan {digest[:DIGEST_LENGTH]}: {found.in_words(steps_left, cost_s)}"
        if not found.pays(steps_left, cost_s):
            return f"{text}: does not pay"
        if self._request.mode == "suggest":
            return f"{text}: pays; see realhf replan, or give --replan switch"
        self._proposal = found
        write_atomically(self._directory.switch, f"{digest}\n".encode())
        return f"{text}: pays; the run changes to it at the next checkpoint"
