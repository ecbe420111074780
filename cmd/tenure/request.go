//go:build unix

package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure"
)

var resignCommand = command{
	name:     "resign",
	synopsis: "-store STORE -key NAME [-json]",
	summary:  "ask the holder to give the lease to another replica",
	about: `
Resign asks the replica that holds the lease to end its program, release the lease, and
not compete for long enough that another replica can take it. It returns when the request
is stored; "tenure watch" shows the outcome. If the holder has vanished, the lease just
expires.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		return func(ctx context.Context, out *output, args []string) error {
			return l.request(ctx, out, args, "", 0)
		}
	},
}

var handoverCommand = command{
	name:     "handover",
	synopsis: "-store STORE -key NAME -to REPLICA [-wait TIME] [-json]",
	summary:  "ask the holder to give the lease to a replica of your choice",
	about: `
Handover asks the replica that holds the lease to end its program and to hand the lease
over to the named replica. For a while only that replica may take it, then any.

The store does not know which replicas stand by, so a name that no replica has is noticed
only when nobody takes the lease. With -wait, handover returns when the named replica
holds it, and fails if another takes it, or if the time is over; without, it returns when
the request is stored.`,
	define: func(flags *flag.FlagSet) action {
		var l lookup
		l.define(flags)
		to := flags.String("to", "", "name of the `REPLICA` that should hold the lease next, as given to tenure run -replica")
		var wait time.Duration
		durationVar(flags, &wait, "wait", 0, "`TIME` to wait until that replica holds the lease (default: not at all)")
		return func(ctx context.Context, out *output, args []string) error {
			switch {
			case *to == "":
				return usageError("no replica: give -to")
			case wait < 0:
				return usageError("-wait %v is negative", wait)
			}
			return l.request(ctx, out, args, *to, wait)
		}
	},
}

// request asks the holder to release the lease, to a replica if one is given, and waits for
// at most that long until that replica holds it.
func (l *lookup) request(ctx context.Context, out *output, args []string, to string, wait time.Duration) error {
	if wait > 0 { // for long enough that somebody looks
		l.store.hideURL(len(args))
	}
	// The context that on passes bounds only the request.
	var waited error
	err := l.on(ctx, args, func(short context.Context, store database) error {
		lease, err := tenure.NewLease(store, tenure.LeaseConfig{Key: l.key.key(), Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			return asUsage(err)
		}
		holding, err := lease.Read(short)
		if err == nil {
			err = lease.RequestHandover(short, to)
		}
		if errors.Is(err, tenure.ErrNotFound) {
			return fmt.Errorf("nobody holds %s", l.key.key())
		}
		if err != nil {
			return err
		}
		answer := requested{Key: l.key.key().String(), Holder: holding.Holder, To: to, waits: wait > 0}
		if l.json {
			err = writeJSON(out.stdout, answer)
		} else {
			err = answer.print(out.stdout)
		}
		if err == nil && wait > 0 && holding.Holder != to {
			waited = l.awaitHandover(ctx, out, store, holding, to, wait)
		}
		return err
	})
	return errors.Join(err, waited)
}

// awaitHandover returns nil when the replica holds the lease that another has held.
func (l *lookup) awaitHandover(ctx context.Context, out *output, store database, from tenure.Holding, to string, wait time.Duration) error {
	hints := store.Watch(l.key.key())
	defer hints.Stop()
	timeout := time.After(wait)
	for {
		view, err := look(ctx, store, l)
		// Where ages are by the clocks of two hosts, a lease that was just taken can look expired.
		isTaken := view.State == stateHeld || view.State == stateExpired && view.Clock != "" && view.Holder != ""
		if err == nil && isTaken && view.Term != from.Term {
			if view.Holder != to {
				return fmt.Errorf("%s was not handed over to %s: %s holds it now; does a replica of that name stand by?", printable(view.Key), printable(to), printable(view.Holder))
			}
			if !l.json {
				_, err = fmt.Fprintf(out.stdout, "%s holds %s\n", printable(to), printable(view.Key))
			}
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-hints.C():
		case <-time.After(watchInterval):
		case <-timeout:
			return fmt.Errorf("%s was not handed over to %s within %v: %s", l.key.key(), printable(to), wait, whyNotTaken(view, to, err))
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
		return printable(v.Holder) + " has vanished, and its lease has expired"
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
			note = " (the store does not know whether a replica of that name stands by; -wait tells)"
		}
		_, err = fmt.Fprintf(w, "asked %s to hand %s over to %s%s\n", printable(r.Holder), printable(r.Key), printable(r.To), note)
	}
	return err
}
