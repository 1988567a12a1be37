"""The broker: worker table, routing, bounded queues, admission, model life cycle, reaper."""
