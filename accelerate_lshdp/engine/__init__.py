"""The torch side: topology, FSDP2 policies, collectives, clipping, checkpoints and a clean shutdown."""
