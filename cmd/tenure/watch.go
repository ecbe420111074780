//go:build unix

package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os/signal"
	"syscall"
	"time"
)

// watchInterval is how often watch reads the lease if no notification wakes it.
const watchInterval = 500 * time.Millisecond

var watchCommand = command{
	name:     "watch",
	synopsis: "-store STORE -key NAME [-json]",
	summary:  "print a line whenever a lease changes hands",
	about: `
Watch prints who holds the lease, and then a line for each change, until it is
interrupted. It may miss a state that lasts less than half a second. If the store stops
answering, watch says so once and keeps trying.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			l.store.hideURL(len(args))
			ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			// The context that on passes bounds only the opening of the store.
			var watched error
			err := l.on(ctx, args, func(_ context.Context, store database) error {
				watched = watch(ctx, store, &l, out)
				return nil
			})
			if ctx.Err() != nil {
				return nil // interrupted while it opened the store
			}
			return errors.Join(err, watched)
		}
	},
}

// change is a line that watch prints.
type change struct {
	At time.Time `json:"at"`
	leaseView
}

// watch prints changes until ctx is done. It returns a store error only if the first read
// fails.
func watch(ctx context.Context, store database, l *lookup, out *output) error {
	hints := store.Watch(l.key.key())
	defer hints.Stop()
	var last *leaseView
	for failing := false; ; {
		view, err := look(ctx, store, l)
		err = explain(store, err)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && last == nil:
			return err
		case err != nil:
			if !failing {
				fmt.Fprintf(out.stderr, "tenure watch: %s; trying again\n", oneLine(err))
			}
			failing = true
		default:
			failing = false
			if last == nil || last.State != view.State || last.Term != view.Term || last.Holder != view.Holder {
				if err := printChange(out.stdout, change{time.Now(), view}, l.json); err != nil {
					return err
				}
			}
			last = &view
		}
		select {
		case <-ctx.Done():
			return nil
		case <-hints.C():
		case <-time.After(watchInterval):
		}
	}
}

func look(ctx context.Context, store database, l *lookup) (leaseView, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	view, err := readLease(ctx, store, l.key.key())
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("the store does not answer: %w", err)
	}
	return view, err
}

func printChange(w io.Writer, c change, asJSON bool) error {
	if asJSON {
		return writeJSON(w, c)
	}
	what := c.State
	switch c.State {
	case stateHeld:
		what += " by " + printable(c.Holder)
	case stateOffered:
		what += " to " + printable(cmp.Or(c.OfferedTo, "anybody"))
	case stateExpired:
		what += ", was held by " + printable(c.Holder)
		if c.Holder == "" {
			what = "expired, was offered to " + printable(cmp.Or(c.OfferedTo, "anybody"))
		}
	}
	_, err := fmt.Fprintf(w, "%s  %s  %s\n", c.At.Format("2006-01-02T15:04:05.000Z07:00"), printable(c.Key), what)
	return err
}
