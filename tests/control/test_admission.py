"""Requests that would be too late are refused at once: by what was measured, and never by a guess alone."""

import pytest

from afserve.clock import FakeClock
from afserve.control.admission import WINDOW_SECONDS, Admission, Objectives
from afserve.control.requests import Requests
from afserve.engine.scheduling.request import NO_TENANT, GenerationRequest, Tenant, TokenEvent
from afserve.errors import OverloadedError
from afserve.member import attention_life
from bench.overload import Case, run

HOME = attention_life(0, 0)
PROMPT = 100  # tokens


class Scene:
    """One node that reads a prompt at a time."""

    def __init__(self):
        self.clock, self.requests = FakeClock(50.0), Requests()
        self.admission = Admission(self.requests)
        self.open = []

    def ask(self, count=1, tenant=NO_TENANT, length=PROMPT):
        for _ in range(count):
            asked = GenerationRequest(0, (1,) * length, tenant=tenant)
            request = self.requests.open(asked, self.clock.now())
            self.requests.place(request, HOME, self.clock.now(), missing=length)
            self.open.append(request)

    def say(self, *requests, end=None):
        self.requests.deliver([TokenEvent(request.number, (7,), end) for request in requests])

    def read(self, count, seconds):
        """So many prompts, one in `seconds`."""
        for request in [r for r in self.open if not r.generated][:count]:
            self.clock.advance(seconds)
            self.say(request)
            self.admission.sample(self.clock.now())

    def check(self, **wanted):
        self.admission.check(PROMPT, Objectives(**wanted), self.clock.now())


def test_a_queue_that_is_too_long_refuses_and_says_when_to_come_again():
    scene = Scene()
    scene.admission.sample(scene.clock.now())
    scene.ask(20)
    scene.admission.sample(scene.clock.now())
    scene.read(10, 0.1)
    assert scene.admission.prompt_rate == pytest.approx(1000, rel=0.3)
    scene.check(ttft=3.0)
    with pytest.raises(OverloadedError, match=r"first token would come after about 1\.. s") as refused:
        scene.check(ttft=0.5)
    assert refused.value.retry_after >= 1.0 and refused.value.status == 429
    with pytest.raises(OverloadedError, match="deadline"):
        scene.check(ttft=5.0, deadline=0.5)
    assert scene.admission.refused == {"ttft": 1, "deadline": 1}
    scene.check()  # who asks for nothing is taken


def test_a_flood_of_one_tenant_counts_for_another_as_far_as_its_share():
    scene, flood = Scene(), Tenant("flood")
    scene.admission.sample(scene.clock.now())
    scene.ask(40, flood)
    scene.admission.sample(scene.clock.now())
    scene.read(10, 0.1)
    with pytest.raises(OverloadedError, match="behind 3,000 tokens"):
        scene.check(ttft=0.5, tenant=flood)
    scene.check(ttft=0.5, tenant=Tenant("other"))
    scene.ask(4, Tenant("other"))
    with pytest.raises(OverloadedError, match="behind 900 tokens"):
        scene.check(ttft=0.5, tenant=Tenant("other"))
    assert scene.requests.before(Tenant("third", 10), PROMPT) == 20
    for request in list(scene.open):
        scene.say(request, end="length")
    assert not scene.requests._asked_by


def test_a_short_prompt_is_not_predicted_to_wait_for_all_of_the_long_ones():
    scene = Scene()
    scene.ask(20, length=5000)
    scene.requests.open(GenerationRequest(0, (1,) * 300), scene.clock.now())
    assert [scene.requests.before(NO_TENANT, own) for own in (1, 100, 400, 6000)] == [21, 2100, 8300, 100_300]


def test_a_prediction_alone_refuses_nobody():
    scene = Scene()
    scene.admission.sample(scene.clock.now())
    scene.ask(12)
    scene.admission.sample(scene.clock.now())
    scene.read(11, 0.1)
    scene.say(scene.open[-1])
    scene.ask(50)  # just now: nobody has waited yet
    scene.check(ttft=0.5)
    scene.clock.advance(0.3)
    with pytest.raises(OverloadedError):
        scene.check(ttft=0.5)


def test_tokens_that_come_too_slowly_refuse_until_nobody_runs():
    scene = Scene()
    scene.ask(4)
    scene.say(*scene.open)
    for _ in range(int(4 * WINDOW_SECONDS / 0.1)):
        scene.admission.sample(scene.clock.now())
        scene.clock.advance(0.1)
        scene.say(*scene.open)
    assert scene.admission.tpot == pytest.approx(0.1, rel=0.3)
    scene.check(tpot=0.2)
    with pytest.raises(OverloadedError, match=r"a token takes \d+ ms .* asked for were 50 ms"):
        scene.check(tpot=0.05)
    with pytest.raises(OverloadedError, match=r"asked for were 0\.1 ms"):
        scene.check(tpot=0.0001)
    scene.say(*scene.open, end="stop")
    for request in scene.open:
        scene.requests.close(request)
    scene.check(tpot=0.05)


@pytest.mark.parametrize("places", [pytest.param(32, marks=pytest.mark.long), 16])
@pytest.mark.slow
def test_goodput_stays_under_four_times_the_load(places):
    """Scripted nodes with the real gateway: the narrow pool is prefill, then decode."""
    calm, taken, everyone = (
        run(Case(load, admits, places=places, warm=6.0, period=10.0))
        for load, admits in ((0.9, True), (4.0, True), (4.0, False))
    )
    assert calm["refused"] <= 0.1
    assert taken["goodput_s"] >= 0.75 * calm["goodput_s"] > 4 * everyone["goodput_s"]
    assert taken["worst_s"] >= 0.5 * taken["goodput_s"], "no swinging"
