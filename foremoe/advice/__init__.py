"""Advice from simulated stages on the number of redundant slots and on what to change next."""

from foremoe.advice.changes import Advice, Case, Change, advise
from foremoe.advice.slots import SlotChoice, SlotOption, choose_slots

__all__ = ["Advice", "Case", "Change", "SlotChoice", "SlotOption", "advise", "choose_slots"]
