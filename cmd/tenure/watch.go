//go:build unix

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
)

// watchInterval is how often watch reads the lease if no notification wakes it.
const watchInterval = 500 * time.Millisecond

func watchCommand(out *output) *cobra.Command {
	o := &options{}
	c := &cobra.Command{
		Use:   "watch --store STORE --key NAME",
		Short: "print a line whenever a lease changes hands",
		Long: `Watch prints who holds the lease, and then a line for each change, until it is
interrupted. It may miss a state that lasts less than half a second. If the store stops
answering, watch says so once and keeps trying.`,
		PreRunE: func(*cobra.Command, []string) error { return o.checkKey() },
		RunE: func(c *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(c.Context(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			// The context that with passes bounds only the opening of the store.
			var watched error
			err := o.store.with(ctx, func(_ context.Context, store database) error {
				watched = o.watch(ctx, store, out)
				return nil
			})
			if ctx.Err() != nil {
				return nil // interrupted while it opened the store
			}
			return errors.Join(err, watched)
		},
	}
	o.leaseFlags(c)
	return c
}

// change is a line that watch prints.
type change struct {
	At time.Time `json:"at"`
	leaseView
}

// watch prints changes until ctx is done. It returns a store error only if the first read
// fails.
func (o *options) watch(ctx context.Context, store database, out *output) error {
	hints := store.Watch(o.key())
	defer hints.Stop()
	var last *leaseView
	for failing := false; ; {
		view, err := look(ctx, store, o.key())
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && last == nil:
			return err
		case err != nil:
			if !failing {
				fmt.Fprintf(out.stderr, "tenure watch: %s; retrying\n", oneLine(err))
			}
			failing = true
		default:
			failing = false
			if last == nil || last.State != view.State || last.Term != view.Term || last.Holder != view.Holder {
				if err := o.show(out, change{time.Now(), view}); err != nil {
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

func look(ctx context.Context, store database, key tenure.Key) (leaseView, error) {
	ctx, cancel := context.WithTimeout(ctx, storeTimeout)
	defer cancel()
	view, err := readLease(ctx, store, key)
	return view, answered(ctx, err)
}

func (c change) print(w io.Writer) error {
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
