"""Reports of whole steps: what they communicate, compute and hold in memory."""

from .explain import explain, explain_step
from .recorder import Recorder
from .step_report import Allocation, LocalCall, Memory, StepReport, report_of

__all__ = [
    "Allocation",
    "LocalCall",
    "Memory",
    "Recorder",
    "StepReport",
    "explain",
    "explain_step",
    "report_of",
]
