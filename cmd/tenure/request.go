//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
)

// requestOptions are the flags of resign and handover.
type requestOptions struct {
	options
	to   string // empty: to any replica
	wait time.Duration
}

func resignCommand(out *output) *cobra.Command {
	o := &requestOptions{}
	c := &cobra.Command{
		Use:   "resign --store STORE --key NAME",
		Short: "ask the holder to give the lease to another replica",
		Long: `Resign asks the replica that holds the lease to end its program, release the lease, and
stop competing for long enough that another replica can take it. It returns when the
request is stored; "tenure watch" shows the outcome. If the holder has vanished, the lease
simply expires.`,
		PreRunE: func(*cobra.Command, []string) error { return o.checkKey() },
		RunE:    func(c *cobra.Command, _ []string) error { return o.request(c.Context(), out) },
	}
	o.leaseFlags(c)
	return c
}

func handoverCommand(out *output) *cobra.Command {
	o := &requestOptions{}
	c := &cobra.Command{
		Use:   "handover --store STORE --key NAME --to REPLICA [--wait TIME]",
		Short: "ask the holder to give the lease to a replica of your choice",
		Long: `Handover asks the replica that holds the lease to end its program and to hand the lease
over to the named replica. For a while only that replica may take it, and then any replica.

The store does not know which replicas stand by, so a mistyped name is noticed only when no
replica takes the lease. With --wait, handover returns when the named replica holds the
lease, and fails if another takes it or the time runs out. Without --wait, it returns when
the request is stored.`,
		PreRunE: func(*cobra.Command, []string) error {
			if o.to == "" {
				return usageError("no replica: give --to")
			}
			return o.checkKey()
		},
		RunE: func(c *cobra.Command, _ []string) error { return o.request(c.Context(), out) },
	}
	o.leaseFlags(c)
	c.Flags().StringVar(&o.to, "to", "", "name of the `REPLICA` that should hold the lease next, as given to tenure run --replica")
	c.Flags().DurationVar(&o.wait, "wait", 0, "`TIME` to wait until that replica holds the lease (default: no wait)")
	return c
}

// request asks the holder to release the lease, to the replica --to if it is given, and waits for
// at most --wait until that replica holds it.
func (o *requestOptions) request(ctx context.Context, out *output) error {
	// The context that with passes bounds only the request.
	var waited error
	err := o.store.with(ctx, func(short context.Context, store database) error {
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: o.key(), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return asUsage(err)
		}
		holding, err := lease.Read(short)
		if err == nil {
			err = lease.RequestHandover(short, o.to)
		}
		if p := o.store.alone(); err != nil && p != nil {
			return errors.New(p.explain())
		}
		if errors.Is(err, tenure.ErrNotFound) {
			return fmt.Errorf("nobody holds %s; %s", o.key(), keyHint)
		}
		if err != nil {
			return err
		}
		answer := requested{Key: o.key().String(), Holder: holding.Holder, To: o.to, waits: o.wait > 0}
		err = o.show(out, answer)
		if err == nil && o.wait > 0 && holding.Holder != o.to {
			waited = o.awaitHandover(ctx, out, store, holding)
		}
		return err
	})
	return errors.Join(err, waited)
}

// awaitHandover returns nil when the replica --to holds the lease that another has held.
func (o *requestOptions) awaitHandover(ctx context.Context, out *output, store database, from tenure.Holding) error {
	hints := store.Watch(o.key())
	defer hints.Stop()
	timeout := time.After(o.wait)
	for {
		view, err := look(ctx, store, o.key())
		if err == nil && view.isTaken() && view.Term != from.Term {
			if view.Holder != o.to {
				return fmt.Errorf("%s was not handed over to %s: %s holds it now; does a replica of that name stand by?", printable(view.Key), printable(o.to), printable(view.Holder))
			}
			if !o.json {
				_, err = fmt.Fprintf(out.stdout, "%s holds %s\n", printable(o.to), printable(view.Key))
			}
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-hints.C():
		case <-time.After(watchInterval):
		case <-timeout:
			return fmt.Errorf("%s was not handed over to %s within %v: %s", o.key(), printable(o.to), o.wait, whyNotTaken(view, o.to, err))
		}
	}
}

// whyNotTaken says what stands in the way of a handover, given the last look at the lease.
func whyNotTaken(v leaseView, to string, err error) string {
	switch {
	case err != nil:
		return err.Error()
	case v.State == stateHeld:
		return printable(v.Holder) + " still holds it"
	case v.State == stateExpired && v.Holder != "":
		return printable(v.Holder) + " no longer renews it: it has vanished, or its job does not return"
	}
	return "nobody has taken it; does a replica named " + printable(to) + " stand by?"
}

// requested is the outcome of a request to a holder.
type requested struct {
	Key    string `json:"key"`
	Holder string `json:"holder"` // the replica that was asked
	To     string `json:"to,omitempty"`
	waits  bool
}

func (r requested) print(w io.Writer) error {
	var err error
	switch r.To {
	case "":
		_, err = fmt.Fprintf(w, "asked %s to release %s\n", printable(r.Holder), printable(r.Key))
	case r.Holder:
		_, err = fmt.Fprintf(w, "%s already holds %s\n", printable(r.Holder), printable(r.Key))
	default:
		note := ""
		if !r.waits {
			note = " (the store does not know whether a replica of that name stands by; --wait tells)"
		}
		_, err = fmt.Fprintf(w, "asked %s to hand %s over to %s%s\n", printable(r.Holder), printable(r.Key), printable(r.To), note)
	}
	return err
}
