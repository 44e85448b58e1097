# Sourced by each script before it does anything: with -h or --help among its arguments, the script
# prints the comment that it begins with, and ends.
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
