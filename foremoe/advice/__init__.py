"""Advice from simulated stages: how many redundant slots to choose, and what to change next."""

from foremoe.advice.changes import Advice, Case, Change, advise
from foremoe.advice.slots import SlotChoice, SlotOption, choose_slots

__all__ = ["Advice", "Case", "Change", "SlotChoice", "SlotOption", "advise", "choose_slots"]
