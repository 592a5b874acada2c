"""Wrong inputs of every kind, given to the real commands: does each end in one clear line and the right status?

case         one kind of wrong input: the small job that it spoils, which command meets it, what that must say
cases        all of them, from the table in cases.yaml
run          runs them as processes, judges what they print, writes the table
"""
