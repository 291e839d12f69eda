# SPDX-License-Identifier: Apache-2.0
"""How kernels are made: a service of worker processes, source modules, ahead-of-time builds.

service, inflight, compile_context, service_progress, shared_compiles    jobs in, futures of kernels out
service_arguments, joined_futures, source_jobs                           what a service takes, and futures made of futures
worker_pool, schedule, pool_tasks, job_futures, task_leases              which worker does which job when
worker_processes, compile_worker, worker_messages                        the processes, and what is said to them
compile_job, module_import, source_modules                               one kernel as data, and where its source comes from
executor_pool, engine_messages, engine_worker                            the same jobs on an engine's workers: Dask, MPI, Ray
shards, completeness                                                     a part of a plan, and a build beside what was used
declarations, build_file, build_plan, retargeted_kernels, bundle_build   from what an author declares to a bundle
"""
