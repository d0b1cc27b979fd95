#!/bin/sh
# Makes a folder with Debian 11's C and C++ libraries and headers (glibc 2.31, libstdc++ of GCC 10),
# to build wheels for distributions older than this machine's. Needs apt, dpkg and Debian's keys, but
# not root.
#
#   docker/old_c_library.sh build/sysroot             fetches the packages and unpacks them
#   docker/old_c_library.sh --compiler build/sysroot  prints the compiler that uses them, for CXX
set -eu

suite=bullseye
gcc=10
machine=$(dpkg --print-architecture)

if [ "$1" = --compiler ]; then
    root=$(readlink -f "$2")
    triplet=$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || gcc -print-multiarch)
    headers=$root/usr/include/c++/$gcc
    # g++ first searches its own folder for start files and libraries. The libraries that MPI needs are
    # on the machines that run it, so they may be missing here.
    echo "g++ --sysroot=$root -nostdinc++ -isystem $headers -isystem $root/usr/include/$triplet/c++/$gcc" \
        "-B$root/usr/lib/$triplet -L$root/usr/lib/gcc/$triplet/$gcc -L$root/usr/lib/$triplet" \
        "-Wl,--allow-shlib-undefined"
    exit
fi

mkdir -p "$1/apt/lists/partial" "$1/apt/cache/archives/partial" "$1/usr/lib" "$1/usr/lib64"
root=$(readlink -f "$1")
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] http://deb.debian.org/debian $suite main" >"$root/apt/sources.list"
touch "$root/apt/status"
in_folder="-o Dir::State=$root/apt -o Dir::State::status=$root/apt/status -o Dir::Cache=$root/apt/cache
    -o Dir::Etc::sourcelist=$root/apt/sources.list -o Dir::Etc::sourceparts=- -o APT::Sandbox::User=root
    -o APT::Architecture=$machine"
# shellcheck disable=SC2086
apt-get -q $in_folder update
cd "$root/apt"
# shellcheck disable=SC2086
apt-get -q $in_folder download libc6 libc6-dev libcrypt-dev linux-libc-dev libstdc++6 \
    libstdc++-$gcc-dev libgcc-$gcc-dev libgcc-s1
for package in *.deb; do
    dpkg -x "$package" "$root"
    rm "$package"
done
# Debian makes /lib and /lib64 links to /usr/lib and /usr/lib64; packages have files in both.
for folder in lib lib64; do
    if [ -d "$root/$folder" ] && [ ! -L "$root/$folder" ]; then
        cp -a "$root/$folder/." "$root/usr/$folder/"
        rm -r "${root:?}/$folder"
    fi
    ln -sfn "usr/$folder" "$root/$folder"
done
# Absolute links would point outside the folder.
find "$root" -type l | while read -r link; do
    case $(readlink "$link") in
        /*) ln -sfnr "$root$(readlink "$link")" "$link" ;;
    esac
done
