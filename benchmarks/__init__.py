"""The benchmarks of dualops: an asv suite derived from the specs, comparisons with peers, and tables and pictures.

    softmax, flash_attention   one module per operator: its asv classes, how it is sampled for the check, its peers
    cases, clock               asv classes from a spec; the clock that passes the GPU's time to asv
    workload, timing           a case on the device: data, rotation, check against float64; events, bursts, memory
    environment                asv's environment: a commit's checkout on the path of the running interpreter
    needs_gpu                  ends asv's timing commands immediately if there is no GPU
    comparison                 python -m benchmarks run: dualops and its peers, in one process
    scaling_run                python -m benchmarks scaling: attention's time and memory against length
    ladder_run, profiler       python -m benchmarks ladder: the steps of a page, timed and profiled
    training_run                python -m benchmarks training: a Llama of a billion parameters, compared with eager
    recorded, plot, scaling_plot, training_plot, ladder_table
                                python -m benchmarks plot: tables and pictures, from committed JSON alone

README.md in this folder has the commands.
"""
