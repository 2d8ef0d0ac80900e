"""Advice on the number of redundant slots and on what to change next, based on simulated stages."""

from foremoe.advice.changes import Advice, Case, Change, advise
from foremoe.advice.slots import SlotChoice, SlotOption, choose_slots

__all__ = ["Advice", "Case", "Change", "SlotChoice", "SlotOption", "advise", "choose_slots"]
