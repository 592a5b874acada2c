"""Wrong inputs of every kind, given to the real commands: does each end in one clear line and the right status?

scene        a small job that is right, in a folder of its own
case         one kind of wrong input: how the scene is spoilt, which command meets it, what it must say
settings  data_rows  surroundings     the cases
run          runs them as processes, judges what they print, writes the table
"""
