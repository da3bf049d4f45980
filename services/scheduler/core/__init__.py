"""The pure core of the scheduler: events in, commands out."""
