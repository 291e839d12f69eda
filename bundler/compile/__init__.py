# SPDX-License-Identifier: Apache-2.0
"""How kernels are made: a service of worker processes, source modules, ahead-of-time builds.

service, service_progress, job_futures                        jobs in, futures of kernels out
worker_pool                                                   which worker does which job when
worker_processes, compile_worker, worker_messages             the processes, and what is said to them
compile_job, module_import, source_modules                    one kernel as data, and where its source comes from
executor_pool, engine_worker                                  the same jobs on an engine's workers: Dask, MPI, Ray
declarations, build_plan, bundle_build                        from what an author declares to a bundle
shards, completeness                                          a part of a plan, and a build beside what was used
program_capture, captured_program                             a program's own warm-up in place of declarations
"""
