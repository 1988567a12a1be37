"""One model over several devices: tensor parallelism, a process for each device."""
