#!/usr/bin/env bash
# A real SLURM on one machine, for tests and for trying a job before it goes to a cluster.
#
#   scripts/mini_slurm.sh up [--nodes N=2] [--cpus C=4] [--gpus G=0] [--dir DIR] [--port P] [--auth munge|none]
#                           [--preempt GRACE_S]
#   scripts/mini_slurm.sh down|status|env [--dir DIR]
#
#   up      starts the cluster and prints the line to use: export SLURM_CONF=DIR/slurm.conf
#   down    cancels the jobs, stops the daemons it started and removes DIR
#   status  prints sinfo and squeue; exit code 0 when the cluster is up, 3 when it is not
#   env     prints the export line alone: eval "$(scripts/mini_slurm.sh env)"
#
# Runs as root or as an ordinary user, for jobs of that user only; needs no systemd, cgroups or containers.
# The nodes are n1..nN, each with a host name of its own where the kernel allows it. A node has C CPUs whatever
# the machine has, its share of the memory, and G GPUs that are links to /dev/null. Nothing is enforced by cgroups.
# DIR is ${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/mini_slurm.$UID unless told; `down` deletes it whole.
# --auth none runs without munge; then every user of the machine can start jobs as you.
# --preempt adds the partitions low and high over all nodes. A job of high takes the nodes of a job of low, which has
# GRACE_S seconds from SLURM's SIGTERM, up to 30 s more as SLURM looks now and then, and is put back into the queue.
# The partition members takes the account of that name alone.
# MPI programs start by srun --mpi=pmi2; the engine chooses MPICH's transport itself, other programs of MPICH 5 need
# MPIR_CVAR_CH4_NETMOD=ofi (gems/engine/transport/environment.py).
# Needs: apt-get install -y --no-install-recommends slurm-wlm munge
# Exit codes: 0; 1 the cluster did not start or stop; 2 wrong usage or missing packages; 3 not up.
set -euo pipefail
umask 077
export LC_ALL=C PATH="$PATH:/usr/sbin:/sbin:/usr/local/sbin"

readonly MAX_DIR_CHARS=60     # a Unix socket's path holds 107, and a step's is DIR/spool/n64/n64_12345678.4294967291
readonly START_LIMIT_S=60 CANCEL_LIMIT_S=30 STOP_LIMIT_S=10 CALL_LIMIT_S=10
readonly SETTINGS_FILE=.mini_slurm

say() { printf 'mini_slurm: %s\n' "$*" >&2; }
die() { local code=$1; shift; say "$*"; exit "$code"; }
call() { timeout "$CALL_LIMIT_S" "$@"; }

wait_until() { # LIMIT_S COMMAND...: polls until the command succeeds; fails when the limit has passed
    local deadline_s=$((SECONDS + $1)); shift
    until "$@"; do
        ((SECONDS < deadline_s)) || return 1
        sleep 0.1
    done
}

# ---------------------------------------------------------------------------------------------- settings

default_dir() {
    local base=${XDG_RUNTIME_DIR:-}
    [[ -n $base && -d $base && -w $base ]] || base=${TMPDIR:-/tmp}
    printf '%s/mini_slurm.%s\n' "${base%/}" "$UID"
}

check_number() { # OPTION VALUE LOW HIGH
    if [[ ! $2 =~ ^[0-9]{1,6}$ ]] || ((10#$2 < $3 || 10#$2 > $4)); then
        die 2 "$1=$2: not a whole number from $3 to $4"
    fi
}

usage() { sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }

parse() {
    VERB=${1:-}; shift || true
    NUM_NODES=2 NUM_CPUS=4 NUM_GPUS=0 DIR='' PORT='' AUTH=munge PREEMPT_GRACE_S=''
    case $VERB in
        up | down | status | env) ;;
        -h | --help | help) usage; exit 0 ;;
        *) die 2 "verb '$VERB' is unknown; allowed: up, down, status, env (--help says more)" ;;
    esac
    while (($#)); do
        local name=${1%%=*} value
        if [[ $1 == -h || $1 == --help ]]; then usage; exit 0; fi
        if [[ $1 == --*=* ]]; then value=${1#*=}; shift
        elif (($# > 1)); then value=$2; shift 2
        else die 2 "option '$1' is unknown or has no value (--help says more)"; fi
        case $name in
            --dir) DIR=$value ;;
            --nodes) check_number "$name" "$value" 1 256; NUM_NODES=$((10#$value)) ;;
            --cpus) check_number "$name" "$value" 1 1024; NUM_CPUS=$((10#$value)) ;;
            --gpus) check_number "$name" "$value" 0 64; NUM_GPUS=$((10#$value)) ;;
            --port) check_number "$name" "$value" 1024 65000; PORT=$((10#$value)) ;;
            --preempt) check_number "$name" "$value" 0 3600; PREEMPT_GRACE_S=$((10#$value)) ;;
            --auth) [[ $value == munge || $value == none ]] || die 2 "--auth=$value: allowed: munge, none"
                AUTH=$value ;;
            *) die 2 "option '$name' is unknown; allowed: --nodes --cpus --gpus --dir --port --auth --preempt" ;;
        esac
    done
    DIR=$(realpath -m -- "${DIR:-$(default_dir)}")
    [[ $DIR =~ ^/[A-Za-z0-9_./+-]+$ ]] || die 2 "--dir=$DIR: allowed are letters, digits and _ . / + -"
    ((${#DIR} <= MAX_DIR_CHARS)) ||
        die 2 "--dir=$DIR has ${#DIR} characters, at most $MAX_DIR_CHARS are allowed; give a shorter --dir"
    CONF=$DIR/slurm.conf
    local name
    for name in ${!SLURM_@} ${!SBATCH_@} ${!SINFO_@} ${!SQUEUE_@} ${!SCANCEL_@}; do unset "$name"; done
    export SLURM_CONF=$CONF
}

need_packages() {
    local program packages=''
    for program in slurmctld slurmd sinfo squeue scancel scontrol; do
        command -v "$program" >/dev/null || packages='slurm-wlm'
    done
    if [[ $AUTH == munge ]] && ! command -v munged >/dev/null; then packages+=${packages:+ }munge; fi
    [[ -z $packages ]] ||
        die 2 "not installed: $packages; run: apt-get install -y --no-install-recommends slurm-wlm munge"
}

is_ours() { [[ -f $DIR/$SETTINGS_FILE && -O $DIR/$SETTINGS_FILE ]]; }

# ---------------------------------------------------------------------------------------------- daemons

# The process of a pid file under DIR/run, if it lives, is owned by us and was started on this DIR.
daemon_pid() { # NAME
    local pid argument=$CONF
    read -r pid 2>/dev/null <"$DIR/run/$1.pid" || return 1
    [[ $pid =~ ^[0-9]+$ && -O /proc/$pid ]] || return 1
    [[ $1 != munged ]] || argument=--socket=$DIR/run/munge.socket
    grep -qzsxF -- "$argument" "/proc/$pid/cmdline" || return 1
    echo "$pid"
}

daemon_pids() {
    local file
    for file in "$DIR"/run/*.pid; do daemon_pid "$(basename "$file" .pid)" || true; done
}

stop() { # PID...
    (($#)) || return 0
    kill -TERM "$@" 2>/dev/null || true
    wait_until "$STOP_LIMIT_S" none_alive "$@" || kill -KILL "$@" 2>/dev/null || true
}

none_alive() { # PID...: zombies count as dead, their parent may never ask
    local pid
    for pid; do ! grep -qs '^State:[[:space:]]*[^XZ]' "/proc/$pid/status" || return 1; done
}

# Processes of jobs (they know their node and our slurm.conf) and step daemons (their log is under DIR).
strays() {
    local proc file
    for proc in /proc/[0-9]*; do
        [[ -O $proc ]] || continue
        if grep -qzsxF -- "SLURM_CONF=$CONF" "$proc/environ" && grep -qzs '^SLURMD_NODENAME=' "$proc/environ"; then
            echo "${proc#/proc/}"
        elif [[ $(readlink "$proc/exe" 2>/dev/null) == */slurmstepd* ]]; then
            for file in "$proc"/fd/*; do
                [[ $(readlink "$file" 2>/dev/null) == "$DIR/"* ]] || continue
                echo "${proc#/proc/}"
                break
            done
        fi
    done
}

answers() { call sinfo --noheader --format=%P >/dev/null 2>&1; }
starts() { # whether the 'up' that made DIR is still at work
    local pid
    read -r pid 2>/dev/null <"$DIR/run/up.pid" || return 1
    [[ -O /proc/$pid ]] && grep -qzs 'mini_slurm' "/proc/$pid/cmdline"
}
is_up() { is_ours && daemon_pid slurmctld >/dev/null && answers; }
no_jobs() { local jobs; jobs=$(call squeue --noheader --format=%i 2>/dev/null) && [[ -z $jobs ]]; }
all_idle() {
    local states
    states=$(call sinfo --Node --noheader --partition=debug --format=%T 2>/dev/null) || return 1
    [[ $(grep -cx idle <<<"$states") -eq $NUM_NODES ]]
}

idle_or_fatal() { all_idle || grep -qs 'fatal:' "$DIR"/log/*.log; }

stop_all() {
    local pids
    if daemon_pid slurmctld >/dev/null && answers; then
        call scancel --quiet --user="$UID" >/dev/null 2>&1 || true
        wait_until "$CANCEL_LIMIT_S" no_jobs || say "jobs did not end within $CANCEL_LIMIT_S s; they are killed"
    fi
    mapfile -t pids < <(daemon_pids)
    stop "${pids[@]}"
    mapfile -t pids < <(strays)
    if ((${#pids[@]})); then
        kill -KILL "${pids[@]}" 2>/dev/null || true
        wait_until "$STOP_LIMIT_S" none_alive "${pids[@]}" || die 1 "processes ${pids[*]} of jobs cannot be stopped"
    fi
    wait_until "$STOP_LIMIT_S" rm -rf -- "$DIR" # once more if someone was still writing a log
}

# ---------------------------------------------------------------------------------------------- configuration

taken_port() { # FIRST: the last of the 1 + NUM_NODES ports from FIRST that is in use; fails when all are free
    local port
    for ((port = $1 + NUM_NODES; port >= $1; port--)); do
        if [[ -n ${USED_PORTS[$port]:-} ]]; then
            echo "$port"
            return
        fi
    done
    return 1
}

choose_port() { # checks the given PORT, or sets it to the first of 1 + NUM_NODES free ones below the ephemeral range
    local address state port
    declare -gA USED_PORTS=()
    while read -r _ address _ state _; do
        if [[ $state == 0A ]]; then USED_PORTS[$((16#${address##*:}))]=1; fi # 0A: listens
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null)
    if [[ -n $PORT ]]; then
        ! port=$(taken_port "$PORT") ||
            die 2 "--port=$PORT: port $port is in use; $((NUM_NODES + 1)) ports from --port on must be free"
        return
    fi
    PORT=$((18000 + $(cksum <<<"$DIR" | cut -d' ' -f1) % 10000)) # another DIR tries other ports first
    while port=$(taken_port "$PORT"); do PORT=$((port + 1)); done
    ((PORT + NUM_NODES < 32768)) || die 1 "no $((NUM_NODES + 1)) neighbouring free ports; choose with --port"
}

choose_host_names() { # how a node gets a host name of its own: uts (root), userns (others), or shared (it does not)
    if unshare --uts hostname probe 2>/dev/null; then echo uts
    elif ((UID)) && unshare --user --map-current-user --keep-caps --uts hostname probe 2>/dev/null; then echo userns
    else echo shared; fi
}

write_configuration() {
    local host memory_mb node_hosts gres='' version cgroup=cgroup/v1 user i
    host=$(uname -n); host=${host%%.*}
    user=$(id -un 2>/dev/null) || die 1 "user $UID has no name in the password database; SLURM needs one"
    memory_mb=$(awk '/^MemTotal:/ {print int($2 / 1024)}' /proc/meminfo)
    memory_mb=$((memory_mb / NUM_NODES))
    node_hosts=$host
    [[ $HOST_NAMES == shared ]] || node_hosts="n[1-$NUM_NODES]"

    mkdir -p "$DIR"/{run,log,state,dev}
    for ((i = 1; i <= NUM_NODES; i++)); do mkdir -p "$DIR/spool/n$i" "$DIR/tmp/n$i"; done
    : >"$DIR/gres.conf"
    if ((NUM_GPUS)); then
        for ((i = 0; i < NUM_GPUS; i++)); do ln -sfn /dev/null "$DIR/dev/gpu$i"; done
        echo "NodeName=n[1-$NUM_NODES] Name=gpu File=$DIR/dev/gpu[0-$((NUM_GPUS - 1))]" >"$DIR/gres.conf"
        gres=" Gres=gpu:$NUM_GPUS"
    fi
    # Older releases know no "disabled"; v1 lets slurmd start with any cgroup mount, as nothing here uses it.
    version=$(slurmctld -V | sed -E 's/[^0-9]*([0-9]+)\.0*([0-9]+).*/\1 \2/')
    ((${version% *} * 100 + ${version#* } < 2405)) || cgroup=disabled
    echo "CgroupPlugin=$cgroup" >"$DIR/cgroup.conf"

    {
        cat <<CONF
ClusterName=mini
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$PORT
SlurmUser=$user
SlurmdUser=$user
StateSaveLocation=$DIR/state
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdSpoolDir=$DIR/spool/%n
SlurmdPidFile=$DIR/run/%n.pid
SlurmdLogFile=$DIR/log/%n.log
# PMIx refuses two nodes with one temporary folder.
TmpFS=$DIR/tmp/%n
# MPICH names shared-memory files by job id, and leaves them behind: ids must not come twice. Clusters beside each
# other differ by their port, and those of one port by when they started, a hundred ids a second.
FirstJobId=$((PORT % 600 * 100000 + $(date +%s%N) / 10000000 % 100000 + 1))
MpiDefault=none
ProctrackType=proctrack/pgid
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=200000,bf_interval=1
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=10
KillWait=5
UnkillableStepTimeout=30
CompleteWait=0
MinJobAge=3600
CONF
        if [[ $AUTH == munge ]]; then
            # A requeued job waits cred_expire seconds, 120 unless told.
            printf '%s\n' AuthType=auth/munge "AuthInfo=socket=$DIR/run/munge.socket,cred_expire=10"
        else
            printf '%s\n' AuthType=auth/none CredType=cred/none
        fi
        ((!NUM_GPUS)) || echo GresTypes=gpu
        cat <<CONF
NodeName=DEFAULT CPUs=$NUM_CPUS Boards=1 SocketsPerBoard=1 CoresPerSocket=$NUM_CPUS ThreadsPerCore=1 State=UNKNOWN
NodeName=DEFAULT RealMemory=$memory_mb$gres
NodeName=n[1-$NUM_NODES] NodeHostname=$node_hosts NodeAddr=127.0.0.1 Port=[$((PORT + 1))-$((PORT + NUM_NODES))]
PartitionName=debug Nodes=ALL Default=YES DefaultTime=30 MaxTime=1440 DefMemPerCPU=$((memory_mb / NUM_CPUS)) State=UP
CONF
        [[ -z $PREEMPT_GRACE_S ]] || cat <<CONF
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=DEFAULT Nodes=ALL DefaultTime=30 MaxTime=1440 DefMemPerCPU=$((memory_mb / NUM_CPUS)) State=UP
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=$PREEMPT_GRACE_S
PartitionName=high PriorityTier=100 PreemptMode=OFF
PartitionName=members PriorityTier=1 PreemptMode=OFF AllowAccounts=members
CONF
    } >"$CONF"
}

# ---------------------------------------------------------------------------------------------- starting

# Daemons take no terminal or pipe of the caller with them: who reads our output would wait for them for ever.
start_munged() {
    chmod 755 "$DIR/run"
    head -c 1024 /dev/urandom >"$DIR/munge.key"
    chmod 400 "$DIR/munge.key"
    # --force: a socket that only we can reach is a complaint otherwise
    munged --force --num-threads=2 --key-file="$DIR/munge.key" --socket="$DIR/run/munge.socket" \
        --pid-file="$DIR/run/munged.pid" --seed-file="$DIR/run/munged.seed" --log-file="$DIR/log/munged.log" \
        </dev/null >>"$DIR/log/start.log" 2>&1
}

start_nodes() {
    local enter=() name_it=1
    case $HOST_NAMES in
        userns) enter=(unshare --user --map-current-user --keep-caps) ;; # one for all: UCX needs it so
        shared) name_it=0 ;;
    esac
    # shellcheck disable=SC2016  # the inner shells expand these
    "${enter[@]}" bash -c '
        conf=$1 num_nodes=$2 name_it=$3
        for ((i = 1; i <= num_nodes; i++)); do
            if ((name_it)); then
                unshare --uts sh -c "hostname \"\$2\" && exec slurmd -f \"\$1\" -N \"\$2\"" sh "$conf" "n$i" || exit 1
            else
                slurmd -f "$conf" -N "n$i" || exit 1
            fi
        done' bash "$CONF" "$NUM_NODES" "$name_it" </dev/null >>"$DIR/log/start.log" 2>&1
}

start_failed() { # WHAT: shows why, leaves nothing behind (the EXIT trap stops what runs)
    { grep -hs 'fatal:' "$DIR"/log/*.log || grep -hsi 'error' "$DIR"/log/*.log; } | tail -n 8 >&2 || true
    die 1 "$1"
}

up() {
    need_packages
    if is_up; then
        say "already up: $(tr '\n' ' ' <"$DIR/$SETTINGS_FILE")(to change it: down, then up)"
        print_env
        return
    fi
    if is_ours; then
        ! starts || die 1 "another 'up' is at work in $DIR"
        say "cleaning up what is left in $DIR"
        stop_all
    fi
    mkdir -p -- "$DIR"
    [[ -O $DIR && -z $(ls -A -- "$DIR") ]] || die 2 "--dir=$DIR: not an empty folder of yours"
    mkdir "$DIR/run" || die 1 "another 'up' is at work in $DIR" # of two at once, one makes it
    echo $$ >"$DIR/run/up.pid"
    trap stop_all EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP

    choose_port
    HOST_NAMES=$(choose_host_names)
    printf '%s\n' "nodes=$NUM_NODES" "cpus=$NUM_CPUS" "gpus=$NUM_GPUS" "port=$PORT" "auth=$AUTH" \
        "host_names=$HOST_NAMES" >"$DIR/$SETTINGS_FILE"
    write_configuration
    if [[ $AUTH == munge ]]; then start_munged || start_failed "munged did not start"; fi
    slurmctld -f "$CONF" </dev/null >>"$DIR/log/start.log" 2>&1 || start_failed "slurmctld did not start"
    start_nodes || start_failed "slurmd did not start"
    wait_until "$START_LIMIT_S" idle_or_fatal || start_failed "the nodes were not idle within $START_LIMIT_S s"
    all_idle || start_failed "a daemon ended"

    rm -f "$DIR/run/up.pid"
    trap - EXIT INT TERM HUP
    say "up: $(tr '\n' ' ' <"$DIR/$SETTINGS_FILE")"
    print_env
}

# ---------------------------------------------------------------------------------------------- other verbs

print_env() { echo "export SLURM_CONF=$CONF"; }

down() {
    if [[ ! -e $DIR ]]; then say "not up ($DIR)"; return; fi
    is_ours || die 2 "--dir=$DIR: not made by 'mini_slurm.sh up', so it is not removed"
    stop_all
    say "down"
}

status() {
    is_up || die 3 "not up ($DIR)"
    call sinfo && echo && call squeue
}

env_line() {
    if ! is_ours || [[ ! -f $CONF ]]; then die 3 "not up ($DIR)"; fi
    print_env
}

parse "$@"
case $VERB in
    up) up ;;
    down) down ;;
    status) status ;;
    env) env_line ;;
esac
