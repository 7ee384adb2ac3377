"""The passes, in order. Each is a function in a file of its name, from values to new values.

fold        model -> copy without storage, fewer layers     passes/fold.py (boundary: marks and stand-ins of layers)
capture     module, inputs -> Program                      passes/capture.py (calls fold, normalize, segments, partition)
axes        Program -> Program with named axes, Axes       passes/axes.py
problem     Program, Axes -> Problem                       passes/problem.py
propagate   Problem, constraints -> Problem                passes/propagate.py
search      Problem, Cluster -> Plan                       passes/search.py (calls placement)
restore     Plan, Problem -> Solution                      passes/restore.py
limits      Program, Problem -> ranges of ids in inputs    passes/limits.py
lower       Program, Problem, Solution -> RankProgram      passes/lower.py (lowerings: of ops that need more than pieces)
check       RankProgram -> ShardingError, or nothing       passes/check.py
roles       RankProgram -> Roles of its parameters         passes/roles.py
fp8         RankProgram -> linear layers in fp8            passes/fp8.py (where the precision is fp8)
stages      RankProgram -> pipeline stages                 passes/stages.py
"""
