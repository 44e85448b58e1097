# Sourced by each script first: with -h or --help among its arguments, the script prints its first
# comment and exits.
for word in "$@"; do
    case $word in
    -h | --help)
        awk 'NR > 1 { if (!sub(/^# ?/, "")) exit; print }' "$0"
        exit
        ;;
    --) break ;;
    esac
done
unset word
