"""The pure core of the scheduler: events in, commands out. No clock, no I/O, no tensor."""
