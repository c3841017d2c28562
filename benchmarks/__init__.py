"""The benchmarks of dualops: an asv suite made from the specs, peers beside it, tables and pictures from its results.

    softmax, flash_attention   one module an operator: its asv classes, how it is sampled for the check, its peers
    cases, clock               what makes an asv class out of a spec; the clock that tells asv the GPU's time
    workload, timing           a case on the device: data, rotation, check against float64; events, bursts, memory
    environment                asv's environment: a commit's checkout on the path of the running interpreter
    needs_gpu                  ends asv's commands that time something at once where there is no GPU
    comparison                 python -m benchmarks run: dualops beside its peers, in one process
    scaling_run                python -m benchmarks scaling: attention's time and memory against length
    ladder_run, profiler       python -m benchmarks ladder: the steps of a page, timed and profiled
    training_run                python -m benchmarks training: a Llama of a billion parameters, beside eager
    recorded, plot, scaling_plot, training_plot, ladder_table
                                python -m benchmarks plot: tables, pictures, from committed JSON alone

README.md in this folder has the commands.
"""
