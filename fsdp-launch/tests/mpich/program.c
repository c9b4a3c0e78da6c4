/* What the ranks of the tests do, by the word that they are given. */
#include <mpi.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MANY = 1 << 18 };

int main(int count, char **words)
{
    const char *mode = count > 1 ? words[1] : "";
    const char *attempt = getenv("FSDP_ATTEMPT");
    int rank, world, on_host, level;
    MPI_Init_thread(&count, &words, MPI_THREAD_FUNNELED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world);

    if (!strcmp(mode, "spawn")) {
        MPI_Comm child;
        MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
        int status = MPI_Comm_spawn("/bin/true", MPI_ARGV_NULL, 1, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &child,
                                    MPI_ERRCODES_IGNORE);
        puts(status == MPI_SUCCESS ? "spawned" : "refused to spawn");
        MPI_Finalize();
        return 0;
    }

    /* More than fits a message that is sent without asking, and uneven. */
    float *all = calloc((size_t)MANY * world, sizeof *all);
    int *counts = calloc(world, sizeof *counts), *places = calloc(world, sizeof *places);
    for (int i = 0; i < world; i++) {
        counts[i] = MANY - i;
        places[i] = i * MANY;
    }
    for (int i = 0; i < MANY; i++)
        all[rank * (size_t)MANY + i] = rank + 1;

    if (rank == world - 1 && !strcmp(mode, "abort"))
        MPI_Abort(MPI_COMM_WORLD, 13);
    if (rank == world - 1 && !strcmp(mode, "kill") && attempt && !strcmp(attempt, "0"))
        raise(SIGKILL);

    MPI_Request request;
    MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, counts, places, MPI_FLOAT, MPI_COMM_WORLD, &request);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    double sum = 0;
    for (int i = 0; i < world; i++)
        sum += all[(size_t)i * MANY + MANY - world - 1];

    MPI_Comm host;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host);
    MPI_Comm_size(host, &on_host);
    printf("rank %d of %d sums %g, %d on its host\n", rank, world, sum, on_host);
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
