"""What outlives a request, outside the block pool: entries in host memory and in a directory.

    keys        what an entry is called, and which model's it is
    chains      which entry goes next when room is needed
    memory      `HostStore`: entries in host buffers
    segment     the form of one file
    directory   `DirectoryStore`: entries in files

An entry is the rows of a stretch of tokens, and what else a request needs to go on behind them, as
one run of bytes; what is where in them is the business of whoever saves. The two stores do not know
each other: each gives and takes buffers, and their user says when bytes move, and on which thread.
"""
