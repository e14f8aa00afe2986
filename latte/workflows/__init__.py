"""Commands that run from start to end over the other rooms: load, convert, train, evaluate, write reports."""
