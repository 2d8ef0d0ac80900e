"""Advice: what a user should choose, from simulated stages: how many redundant slots, and what to change next."""

from foremoe.advice.slots import SlotChoice, SlotOption, choose_slots

__all__ = ["SlotChoice", "SlotOption", "choose_slots"]
