// Command bench compares this library with others that keep leases, on one machine and in
// one run. README.md defines each figure.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	bePart()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second interrupt ends the process immediately
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// Exit codes.
const (
	exitOK = iota
	exitFailed
	exitUsage
)

func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	c, err := parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		usage(stdout)
		return exitOK
	case err != nil:
		fmt.Fprintf(stderr, "bench: %v (-h for help)\n", err)
		return exitUsage
	}
	if err := c.bench(ctx, stdout, stderr); err != nil {
		if interrupted(ctx) {
			err = errors.New("interrupted")
		}
		fmt.Fprintf(stderr, "bench: %v\n", err)
		return exitFailed
	}
	return exitOK
}
