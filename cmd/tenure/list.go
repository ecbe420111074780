//go:build unix

package main

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/objects"
	leaserecord "github.com/tenurelib/tenure/internal/record"
)

// The most that list reads if no type is given: the store may have millions of objects that are not
// leases. Each type costs a query, and all queries together have 5 s.
const (
	mostTypes  = 100
	mostOfType = 1000 // objects
)

func listCommand(out *output) *cobra.Command {
	o := &options{}
	var kind string
	var sessions, drained bool
	c := &cobra.Command{
		Use:   "list --store STORE [--type TYPE | --sessions | --drained]",
		Short: "show all leases, all sessions, or all drained replicas",
		Long: `List shows the leases of all types, or of one: those that are held, and those that have
expired without being released. It leaves out the records of sessions. --sessions shows these,
with the numbers of keys and rows of queues that each session owns. It counts up to 100,000
of each kind, and then prints 100000+. --drained shows the replicas that "tenure drain" has
marked.

Without --type, list reads at most 100 types and the first 1,000 objects of each, shows
the leases among them, and says on stderr which types have more. With --type, it reads and
shows all objects of the type.`,
		PreRunE: func(c *cobra.Command, _ []string) error {
			if kind == "" && c.Flags().Changed("type") {
				return usageError("--type is empty")
			}
			return nil
		},
		RunE: func(c *cobra.Command, _ []string) error {
			return o.store.reading(c.Context(), out, func(ctx context.Context, store database, out *output) error {
				if sessions {
					return o.showSessions(ctx, store, out)
				}
				if drained {
					marks, err := tenure.Drains(ctx, store)
					list := drainList{}
					for _, d := range marks {
						list = append(list, viewOfDrain(d))
					}
					return cmp.Or(err, o.show(out, list))
				}
				var views leaseList
				var err error
				none := "no leases"
				if kind == "" {
					views, err = o.store.listAllLeases(ctx, store, out)
				} else {
					views, err = listLeases(ctx, store, kind)
					none += " of type " + printable(kind)
				}
				if err != nil {
					return err
				}
				var all []*leaseView
				for i := range views {
					all = append(all, &views[i])
				}
				noteFailover(ctx, store, all...)
				if p := o.store.alone(); p != nil {
					fmt.Fprintln(out.stderr, p.explain())
				} else if len(views) == 0 && !o.json {
					fmt.Fprintln(out.stderr, none)
				}
				return o.show(out, views)
			})
		},
	}
	o.storeFlags(c)
	c.Flags().StringVar(&kind, "type", "", "`TYPE` of the leases' keys (default: leases of all types)")
	c.Flags().BoolVar(&sessions, "sessions", false, "list the sessions of package claims, and how many keys each owns")
	c.Flags().BoolVar(&drained, "drained", false, "list the replicas that are drained")
	o.jsonFlag(c)
	c.MarkFlagsMutuallyExclusive("type", "sessions", "drained")
	return c
}

func (o *options) showSessions(ctx context.Context, store database, out *output) error {
	views, unread, err := listSessions(ctx, store)
	none := "no sessions"
	if missing := (*objects.NoTable)(nil); errors.As(err, &missing) && missing.OfClaims {
		views, none = sessionList{}, "no sessions: no program uses package claims here"
		_, err = listLeases(ctx, store, objects.SessionType) // which fails if all tables are missing
	}
	if err != nil {
		return err
	}
	if len(views) == 0 && !o.json {
		fmt.Fprintln(out.stderr, none)
	}
	if unread != nil {
		fmt.Fprintln(out.stderr, "some queues can't be read:", oneLine(unread))
	}
	return o.show(out, views)
}

// listLeases returns the leases of a type. An object of that type whose record can't be read counts as a
// lease, as it does for replicas.
func listLeases(ctx context.Context, store database, kind string) (leaseList, error) {
	views := leaseList{} // not nil, so that JSON has an empty array
	for obj, err := range tenure.List(ctx, store, kind) {
		if err != nil {
			return nil, err
		}
		view, err := viewOf(ctx, store, obj)
		if err != nil {
			return nil, err
		}
		views = append(views, view)
	}
	return views, nil
}

// listAllLeases returns the leases of all types, except for the records of sessions. It says on stderr what
// it has not read.
func (s *storeFlag) listAllLeases(ctx context.Context, store database, out *output) (leaseList, error) {
	types, err := s.typesOf(ctx, store, mostTypes+1)
	if err != nil {
		return nil, err
	}
	if len(types) > mostTypes {
		types = types[:mostTypes]
		fmt.Fprintf(out.stderr, "there are more than %d types of objects; --type TYPE lists one\n", mostTypes)
	}
	slices.Sort(types)
	views := leaseList{}
	for _, kind := range types {
		if !mayHaveLeases(kind) {
			continue
		}
		read := 0
		for obj, err := range tenure.List(ctx, store, kind) {
			if err != nil {
				return nil, err
			}
			if read++; read > mostOfType {
				fmt.Fprintf(out.stderr, "only the first %d objects of type %[2]s were read; --type %[2]s reads all\n", mostOfType, printable(kind))
				break
			}
			if !isLease(obj) {
				continue
			}
			view, err := viewOf(ctx, store, obj)
			if err != nil {
				return nil, err
			}
			views = append(views, view)
		}
	}
	return views, nil
}

// mayHaveLeases reports whether objects of a type may be leases.
func mayHaveLeases(kind string) bool {
	return kind != objects.SessionType && kind != objects.LineageType && kind != objects.DrainType && (tenure.Key{Type: kind, ID: "any"}).Validate() == nil
}

// isLease reports whether an object is the record of a lease. The payload of another object may be anything.
// The objects of the default type are leases, even those whose record can't be read.
func isLease(obj tenure.Object) bool {
	var p leaserecord.Payload
	return obj.Key.Type == defaultType || json.Unmarshal(obj.Payload, &p) == nil && p.Term != "" && p.TTLMS > 0
}

// typesOf returns at most n types of the objects in a store. On Postgres and SQLite it makes one look into the
// index of the primary key for each type, however many objects there are.
func (s *storeFlag) typesOf(ctx context.Context, store database, n int) (types []string, err error) {
	if store, ok := store.(interface {
		Types(context.Context, int) ([]string, error)
	}); ok { // NATS, etcd, Kubernetes and MySQL
		return store.Types(ctx, n)
	}
	// Get explains what is wrong with a table; the errors below are the driver's.
	if _, err := store.Get(ctx, tenure.Key{Type: defaultType, ID: "any"}); err != nil && !errors.Is(err, tenure.ErrNotFound) {
		return nil, err
	}
	query := `SELECT object_type FROM ` + s.quotedTable("") + ` WHERE object_type > $1 %s ORDER BY object_type LIMIT 1`
	for after := ""; len(types) < n; types = append(types, after) {
		switch store := store.(type) {
		case *tenure.PostgresStore:
			err = store.Pool().QueryRow(ctx, fmt.Sprintf(query, ""), after).Scan(&after)
		case *tenure.SQLiteStore:
			// A blob comes after all text, also after the text of the same bytes.
			err = store.DB().QueryRowContext(ctx, fmt.Sprintf(query, "AND typeof(object_type) = 'text'"), after).Scan(&after)
		}
		if errors.Is(err, sql.ErrNoRows) {
			return types, nil
		}
		if err != nil {
			return nil, err
		}
	}
	return types, nil
}

// leaseList is what list shows.
type leaseList []leaseView

func (l leaseList) print(w io.Writer) error {
	table := newSheet(w)
	table.row("LEASE", "HOLDER", "FOR", "STATE")
	for _, v := range l {
		state := v.expiry()
		if v.RunningSince != nil {
			state += fmt.Sprintf("; one run for %v", ago(*v.RunningSince))
		}
		holder := printable(v.Holder)
		if v.Holder == "" {
			holder = "(none)"
		}
		table.row(printable(v.Key), holder, v.heldFor().String(), state)
	}
	return table.Flush()
}
