/* Open MPI's all-reduce: every rank is a trainer, and there is no server. Called as rounds.py's scripts are. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PERIOD = 1021, LINE = 100 };

/* Waits without keeping a core, as long as it is somebody else's turn. */
static int asked(int rank) {
    char line[LINE];
    int rounds = 0, done = 0;
    if (rank == 0 && (!fgets(line, LINE, stdin) || sscanf(line, "run %d", &rounds) != 1)) rounds = 0;
    MPI_Request request;
    MPI_Ibcast(&rounds, 1, MPI_INT, 0, MPI_COMM_WORLD, &request);
    for (struct timespec nap = {0, 500000}; !done; nanosleep(&nap, NULL)) MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    return rounds;
}

static float gradient(int rank, long round, long index) {
    unsigned place = (unsigned)((index + (round / 2 * 17 + rank * 101) % PERIOD) % PERIOD);
    float value = (float)((place * 0x9e3779b1u >> 29) + 1);
    return round % 2 == 0 ? value : -value;
}

int main(int count, char **words) {
    long bytes = 0, round = 0;
    for (int word = 1; word + 1 < count; word++)
        if (!strcmp(words[word], "--bytes")) bytes = atol(words[word + 1]);
    int rank, ranks;
    MPI_Init(&count, &words);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    long elements = bytes / 4;
    float *given = calloc(elements, 4), *sum = calloc(elements, 4);
    const char *who = "\"peer\": \"Open MPI all-reduce\", \"version\"";
    if (rank == 0) printf("{%s: \"%d.%d.%d\"}\n", who, OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION);
    fflush(stdout);
    for (int rounds; (rounds = asked(rank)) > 0;) {
        long wrong = 0, all = 0;
        double *seconds = calloc(rounds, sizeof *seconds), *slowest = calloc(rounds, sizeof *slowest);
        for (int index = 0; index < rounds; index++, round++) {
            float own[PERIOD], expected[PERIOD];
            for (int place = 0; place < PERIOD; place++) {
                own[place] = gradient(rank, round, place);
                expected[place] = 0;
                for (int other = 0; other < ranks; other++) expected[place] += gradient(other, round, place);
            }
            for (long place = 0; place < elements; place++) given[place] = own[place % PERIOD];
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            MPI_Allreduce(given, sum, (int)elements, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            seconds[index] = MPI_Wtime() - start;
            for (long place = 0; place < elements; place++) wrong += sum[place] != expected[place % PERIOD];
        }
        MPI_Reduce(seconds, slowest, rounds, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        MPI_Reduce(&wrong, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("{%s: \"%d.%d.%d\", ", who, OMPI_MAJOR_VERSION, OMPI_MINOR_VERSION, OMPI_RELEASE_VERSION);
            printf("\"bytes\": %ld, \"trainers\": %d, \"wrong\": %ld, \"seconds\": [", bytes, ranks, all);
            for (int index = 0; index < rounds; index++) printf("%s%.9f", index ? ", " : "", slowest[index]);
            printf("]}\n");
            fflush(stdout);
        }
        free(seconds);
        free(slowest);
    }
    MPI_Finalize();
    return 0;
}
