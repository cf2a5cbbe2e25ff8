"""The phases of scripts/distill_demo_moe.py, a file each, and the two models they work on."""
