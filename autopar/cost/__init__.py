"""The cost model: seconds of compute and communication, bytes of memory, from sizes and a Cluster.

compute.py         one op on local sizes, forward and backward
communication.py   one collective along a mesh axis
prices.py          both, for one cluster, mesh and precision: what the searches ask
memory.py          bytes one rank holds, by kind
"""
