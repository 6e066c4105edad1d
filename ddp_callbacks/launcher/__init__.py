"""What starts a job on many nodes.

hosts       which nodes, and how many processes on each: named by hand or in a host file
"""
