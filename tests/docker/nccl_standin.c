// A stand-in for a program of nccl-tests that needs no GPU. Options, help, table, status and JSON are as in v2.13.11,
// v2.17.1 and v2.19.6 (src/common.cu and src/util.cu). The file `behaviour` in the program's folder contains
// `VERSION FAULT GB/S HOST`. HOST is ten times slower than the other hosts. Faults: none, wrong, hang. With NCCL_ALGO=Tree, it
// is 3 % slower; with any NCCL_ALGO, runs differ by up to 0.6 %.
#include <getopt.h>
#include <libgen.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double size(const char *text) {
  char unit = 0;
  double value = 0;
  sscanf(text, "%lf%c", &value, &unit);
  return value * (unit == 'G' ? 1 << 30 : unit == 'M' ? 1 << 20 : unit == 'K' ? 1 << 10 : 1);
}

int main(int argc, char **argv) {
  char path[4096], fault[20] = "none", slow[100] = "-", host[100], *json = NULL;
  int version = 19, check = 1, rank = 0, ranks = 1, sum = 0, slowed = 0;
  double rate = 400, from = 32 << 20, to = 32 << 20, factor = 1;
  setlinebuf(stdout);
  snprintf(path, sizeof path, "%s", argv[0]);
  char *program = strdup(basename(strdup(path)));
  strcat(dirname(path), "/behaviour");
  FILE *behaviour = fopen(path, "r");
  if (behaviour) fscanf(behaviour, "2.%d %19s %lf %99s", &version, fault, &rate, slow), fclose(behaviour);
  static struct option names[] = {{"minbytes", 1, 0, 'b'}, {"maxbytes", 1, 0, 'e'}, {"help", 0, 0, 'h'}, {}};
  const char *options = version >= 19   ? "t:g:b:e:i:f:n:m:w:N:p:I:K:c:o:d:r:z:y:T:hG:C:a:R:x:D:V:J:S:M:u:"
                        : version >= 17 ? "t:g:b:e:i:f:n:m:w:N:p:c:o:d:r:z:y:T:hG:C:a:R:x:D:V:"
                                        : "t:g:b:e:i:f:n:m:w:N:p:c:o:d:r:z:y:T:hG:C:a:R:";
  for (int c; (c = getopt_long(argc, argv, options, names, NULL)) != -1;) {
    if (c == 'b') from = size(optarg);
    if (c == 'e') to = size(optarg);
    if (c == 'f') factor = atof(optarg);
    if (c == 'c') check = atoi(optarg);
    if (c == 'J') json = optarg;
    if (c != 'h' && c != '?') continue;
    if (c != 'h') printf("invalid option '%c'\n", c);
    printf("USAGE: %s \n\t[-b,--minbytes <min size in bytes>] \n\t[-e,--maxbytes <max size in bytes>] \n\t", program);
    if (version >= 19)
      printf("[-J,--output_file <file> write output to filepath, if accessible. Infer type from suffix (only json supported presently.)] \n\t");
    printf("[-h,--help]\n");
    return 0;
  }
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  if (sum != ranks * (ranks - 1) / 2) return 9;
  // the nodes of a Slurm cluster on one machine share the machine's name
  if (getenv("SLURMD_NODENAME")) snprintf(host, sizeof host, "%s", getenv("SLURMD_NODENAME"));
  else gethostname(host, sizeof host);
  if (!strcmp(fault, "hang")) sleep(3600);
  const char *algorithm = getenv("NCCL_ALGO"), *debug = getenv("NCCL_DEBUG");
  if (algorithm) rate *= (strcmp(algorithm, "Tree") ? 1 : 0.97) * (1 + (getpid() % 7 - 3) / 1000.);
  char line[300], *lines = calloc(ranks, sizeof line);
  snprintf(line, sizeof line, "#  Rank %2d Group %2d Pid %6d on %10s device %2d [0000:%02x:00] NVIDIA A100 80GB PCIe\n", rank, 0,
           getpid(), host, rank % 4, 24 + rank % 4);
  MPI_Gather(line, sizeof line, MPI_BYTE, lines, sizeof line, MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank == 0) {
    FILE *out = fopen(json ? json : "/dev/null", json ? "wx" : "w");
    if (!out) return 8;
    fprintf(out, "{\"version\":1,\"args\":[\"%s\"],\"env\":[\"SECRET=hunter2\"],\"nccl_version\":22803,\"config\":{", argv[0]);
    fprintf(out, "\"nthreads\":1,\"ngpus\":1,\"minimum_bytes\":%.0f,\"maximum_bytes\":%.0f,\"step_factor\":%.0f,", from, to, factor);
    fprintf(out, "\"validation\":%d,\"devices\":[", check);
    if (algorithm && debug && !strcmp(debug, "INFO"))
      printf("vm:1:2 [0] NCCL INFO NCCL_ALGO set by environment to %s.\n", algorithm);
    if (ranks > 1) printf("vm:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> %d[0] [send] via NET/Socket/0\n", ranks - 1);
    if (version >= 19) printf("# nccl-tests version 2.19.6 nccl-headers=22803 nccl-library=22803\n");
    if (version >= 17) printf("# Collective test starting: %s\n", program);
    printf("# nThread 1 nGpus 1 minBytes %.0f maxBytes %.0f step: %.0f(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: %d graph: 0\n",
           from, to, factor, check);
    printf("#\n# Using devices\n");
    for (int i = 0; i < ranks; i++) {
      char on[100];
      printf("%s", lines + i * sizeof line);
      sscanf(strstr(lines + i * sizeof line, " on "), " on %99s", on);
      slowed |= !strcmp(on, slow);
      fprintf(out, "%s{\"rank\":%d,\"group\":0,\"hostname\":\"%s\",\"device\":%d,\"device_info\":\"NVIDIA A100 80GB PCIe\"}",
              i ? "," : "", i, on, i % 4);
    }
    fprintf(out, "]},\"results\":[");
    printf("#\n#                                                              out-of-place                       in-place          \n");
    printf("#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong\n");
    printf("#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)       \n");
    double best = slowed ? rate / 10 : rate, share = ranks > 1 ? 2. * (ranks - 1) / ranks : 1, total = 0;
    int sizes = 0, bad = !strcmp(fault, "wrong");
    for (double bytes = from; bytes <= to; bytes *= factor, sizes++) {
      double busbw = best * bytes / (bytes + (1 << 24)), algbw = busbw / share;
      char wrong[20] = "N/A";
      if (check) snprintf(wrong, sizeof wrong, "%d", bad && bytes == from ? 7 : 0);
      printf("%12.0f  %12.0f     float     sum      -1  %7.1f  %6.2f  %6.2f  %5s  %7.1f  %6.2f  %6.2f  %5s\n", bytes, bytes / 4,
             bytes / algbw / 1e3, algbw, busbw, wrong, bytes / algbw / 1e3, algbw, busbw, wrong);
      const char *half = "{\"time\":%f,\"alg_bw\":%f,\"bus_bw\":%f,\"nwrong\":%s}";
      fprintf(out, "%s{\"size\":%.0f,\"count\":%.0f,\"type\":\"float\",\"redop\":\"sum\",\"root\":\"-1\",\"out_of_place\":",
              sizes ? "," : "", bytes, bytes / 4);
      fprintf(out, half, bytes / algbw / 1e3, algbw, busbw, check ? wrong : "null");
      fprintf(out, ",\"in_place\":");
      fprintf(out, half, bytes / algbw / 1e3, algbw, busbw, check ? wrong : "null");
      fprintf(out, "}");
      total += busbw;
    }
    fprintf(out, "],\"out_of_bounds\":{\"count\":%d,\"okay\":%s},", bad, bad ? "false" : "true");
    fprintf(out, "\"average_bus_bandwidth\":{\"bandwidth\":%f,\"okay\":\"unchecked\"}}", total / sizes);
    fclose(out);
    printf("# Out of bounds values : %d %s\n# Avg bus bandwidth    : %g \n#\n", bad, bad ? "FAILED" : "OK", total / sizes);
    if (version >= 17) printf("# Collective test concluded: %s\n", program);
  }
  MPI_Finalize();
  return !strcmp(fault, "wrong");
}
