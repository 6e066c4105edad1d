"""What starts a job on many nodes.

hosts       which nodes, and how many processes on each: named by hand or in a host file
node        what runs on a node: it starts the job there, and ends all of it with the connection
remote      how the job gets there unchanged, over ssh or any other pipe
"""
