#!/bin/sh
# Installs what a peer needs from package registries: install.sh KIT FOLDER. A second call finds it there.
#
# Each kit has a virtual environment of its own: their needs exclude each other. Versions are named, so that a figure
# can be measured again. Nothing leaves FOLDER except pip's cache and, for openmpi, Debian's packages.
set -eu
kit=$1
folder=$2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$folder"
if [ -e "$folder/$kit/installed" ] && { [ "$kit" != openmpi ] || [ -x "$folder/$kit/mpirun" ]; }; then
    exit 0
fi

# A virtual environment with packages, and nothing that they only need elsewhere. Python compiles what is imported.
environment() {
    rm -rf "${folder:?}/$kit"
    ${PYTHON:-python3} -m venv "$folder/$kit"
    "$folder/$kit/bin/pip" install --quiet --no-compile --no-deps "$@"
}

# Packages of Debian's.
debian() {
    if [ "$(id -u)" != 0 ]; then
        echo "$* are missing, which only root can install" >&2
        exit 1
    fi
    apt-get update --quiet
    DEBIAN_FRONTEND=noninteractive apt-get install --quiet --yes "$@"
}

# The program of this name that is Open MPI's, as its version says: MPICH's programs have the same names.
open_mpi() {
    for program in "$1.openmpi" "$1"; do
        if "$program" "$2" 2>/dev/null | grep -q 'Open MPI'; then
            echo "$program"
            return
        fi
    done
    echo "no $1 here is Open MPI's" >&2
    return 1
}

case $kit in
mxnet)
    # It says np.bool, which later NumPys have not.
    environment mxnet==1.9.1 numpy==1.23.5 requests urllib3 idna certifi charset-normalizer graphviz
    "$folder/$kit/bin/python" "$here/mxnet_kvstore.py" --version
    ;;
paddle)
    # Later releases have no parameter server in their wheels.
    environment paddlepaddle==2.6.2 numpy==1.26.4 protobuf==4.25.8 setuptools==69.5.1 \
        decorator astor opt-einsum==3.3.0 pillow httpx httpcore h11 anyio sniffio idna certifi typing-extensions
    "$folder/$kit/bin/python" "$here/paddle_brpc.py" --version
    ;;
torch)
    # The wheel needs CUDA's libraries to be loaded at all, also where there is no such device; not its compilers.
    environment torch==2.15.0 numpy filelock typing-extensions setuptools sympy mpmath networkx jinja2 markupsafe \
        fsspec nvidia-cudnn-cu13==9.26.0.51 nvidia-cusparselt-cu13==0.8.1 nvidia-nccl-cu13==2.30.7 \
        nvidia-nvshmem-cu13==3.7.2
    "$folder/$kit/bin/pip" install --quiet --no-compile \
        'cuda-toolkit[cublas,cudart,cufft,cufile,cupti,cusparse,nvjitlink,nvrtc]==13.2.2' 2>&1
    "$folder/$kit/bin/python" "$here/torch_gloo.py" --version
    ;;
pslite)
    # BytePS is published as source, with its ps-lite; what its server needs is compiled, and nothing of it installed.
    [ -e /usr/include/zmq.h ] || debian libzmq3-dev
    environment numpy==1.26.4
    mkdir -p "$folder/$kit/source/unused"
    "$folder/$kit/bin/pip" download --quiet --no-deps --no-binary :all: --dest "$folder/$kit/source" \
        byteps==0.2.5.post15
    cd "$folder/$kit/source"
    tar xzf byteps-0.2.5.post15.tar.gz --strip-components 1
    # Its threads ask a socket without pause whether there is something, each on a core of its own. Where cores are few
    # a pause of 50 us makes it two to four times as fast. Unix sockets have no file that stays behind.
    sed -i -e '/CHECK(zmq_msg_init(zmsg) == 0)/a bool idle = false;' \
        -e '/^ \{10\}std::lock_guard/i if (idle) usleep(50);' \
        -e 's/(errno == EAGAIN) {/& idle = true;/' -e 's|ipc:///tmp/|ipc://@pslite-|' 3rdparty/ps-lite/src/zmq_van.h
    # It asks for Python's header and uses nothing of it.
    touch unused/Python.h
    common=byteps/common
    g++ -std=c++14 -O3 -march=native -fopenmp -fPIC -shared -w -DBYTEPS_BUILDING_SERVER \
        -Iunused -I. -I3rdparty/ps-lite/include -I3rdparty/ps-lite/src -o "../$kit.so" "$here/pslite.cc" \
        3rdparty/ps-lite/src/customer.cc 3rdparty/ps-lite/src/postoffice.cc 3rdparty/ps-lite/src/van.cc \
        byteps/server/server.cc $common/cpu_reducer.cc $common/logging.cc $common/common.cc \
        $common/compressor/*.cc $common/compressor/impl/*.cc -lzmq -lpthread -lrt
    ../bin/python "$here/pslite.py" --version
    cd - >/dev/null
    ;;
openmpi)
    if ! open_mpi mpicc --showme:version >/dev/null || ! open_mpi mpirun --version >/dev/null; then
        debian libopenmpi-dev openmpi-bin
    fi
    compiler=$(open_mpi mpicc --showme:version)
    launcher=$(open_mpi mpirun --version)
    mkdir -p "$folder/$kit"
    # By its name: started by a path, it takes the folder above for the one that Open MPI is installed in.
    printf '#!/bin/sh\nexec %s "$@"\n' "$launcher" >"$folder/$kit/mpirun"
    chmod +x "$folder/$kit/mpirun"
    OMPI_CC=${CC:-cc} "$compiler" -O3 -march=native -Wall -Wextra -o "$folder/$kit/openmpi" "$here/openmpi.c"
    ;;
*)
    echo "$kit: not a kit; expected mxnet, pslite, paddle, torch or openmpi" >&2
    exit 1
    ;;
esac
touch "$folder/$kit/installed"
