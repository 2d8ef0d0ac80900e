"""The demo: a small MoE language model learns by GRPO on processes of this machine, with and without foremoe. Needs torch."""
