"""Pricing: keeps the scheduler's cost model in step with what steps really take."""

from aspire.schedule.plan import StepPlan
from aspire.schedule.scheduler import Scheduler
from aspire.speculation.online_fit import OnlineFit


class Pricing:
    """Feeds measured decoding steps to an online fit and hands each renewed model to the scheduler."""

    def __init__(self, scheduler: Scheduler, fit: OnlineFit) -> None:
        self._scheduler = scheduler
        self._fit = fit
        self.predicted: float | None = None  # seconds that the model in force gave the last priced step

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took that long. Steps with prefill, admissions or nothing to do say little of decoding."""
        if not plan.rows or plan.admissions or plan.prefills:
            return
        cost = self._scheduler.cost
        kv_bytes = cost.kv.plan_bytes(plan)
        self.predicted = cost.step_seconds(plan.num_tokens, kv_bytes) if cost.fitted else None
        model = self._fit.add(plan.num_tokens, kv_bytes, seconds)
        if model is not None:
            self._scheduler.cost = model
