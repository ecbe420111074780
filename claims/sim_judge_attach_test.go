package claims_test

import (
	"context"
	"strconv"
	"strings"
	"time"

	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/objects"
	"github.com/tenurelib/tenure/internal/testkit"
)

const wishes = "tenure.attach/"

// isWish reports whether a row is not a key, but says that its owner attaches to one.
func isWish(r objects.Claim) bool { return strings.HasPrefix(r.Kind, wishes) }

// wishedFor returns the claim that a wish is for.
func wishedFor(wish objects.Claim) objects.Claim {
	parts := strings.SplitN(wish.ID, "/", 3)
	token, _ := strconv.ParseInt(parts[1], 10, 64)
	return objects.Claim{Kind: strings.TrimPrefix(wish.Kind, wishes), ID: parts[2], Session: parts[0], Token: token}
}

// offer is what the judge knows of a claim for which there was a wish.
type offer struct {
	to string    // the session whose wish it is
	at time.Time // when the owner offered the key; zero: it has not
}

// wished is called when a session has claimed a wish.
func (j *judge) wished(_ context.Context, wish objects.Claim) {
	testkit.Count(&j.judged, "wishes to attach")
	c := wishedFor(wish)
	j.offers[c], j.keys[c.ID].wished = &offer{to: wish.Session}, true
}

// offered is called when the owner of a key offers it. Its func has returned, and none begins.
func (j *judge) offered(ctx context.Context, before, wish objects.Claim) {
	c, l := wishedFor(wish), lifeOf(ctx)
	testkit.Count(&j.judged, "keys that were offered")
	if wish.Session != c.Session {
		j.violated("attach", "%s offers %s, which is another's", l.name, c.ID)
	}
	j.notRunning(c, l.name+" offers")
	j.offers[c] = &offer{to: before.Session, at: time.Now()}
}

func (j *judge) notRunning(c objects.Claim, what string) {
	for _, r := range j.keys[c.ID].runs {
		if r.Session == c.Session && r.Token == c.Token {
			j.violated("attach", "%s %s while its func runs", what, c.ID)
		}
	}
}

// attached is called when a process takes a key that its owner has offered.
func (j *judge) attached(l *life, o *offer, before, after objects.Claim) {
	testkit.Count(&j.judged, "keys that were attached to")
	if o.to != after.Session {
		j.violated("attach", "%s takes %s, which is offered to another", l.name, after.ID)
	}
	j.notRunning(before, l.name+" attaches to")
}

// offerEnds is called when a key is free that was offered. Who has asked for it has had the time to take it, if it lives.
func (j *judge) offerEnds(by *life, before objects.Claim) {
	o, s := j.offers[before], j.sessions[before.Session]
	if o == nil || o.at.IsZero() || s.life != by || !s.stands() || s.tainted || !j.sessions[o.to].stands() {
		return
	}
	if well, ok := by.isWell(); !ok || well.Add(by.slack()).After(o.at) { // it may not know that it has offered the key
		return
	}
	if lasted := time.Since(o.at); lasted < min(s.ttl/6, 2*time.Second) {
		j.violated("attach", "%s frees %s, which it has offered for no more than %v", by.name, before.ID, lasted)
	}
}

// attachingKey marks the contexts of calls of Attach.
type attachingKey struct{}

// attach attaches to a key.
func (l *life) attach(ctx context.Context, id string) []claims.Claim {
	ctx, done := l.waits(ctx, []string{id})
	defer done()
	c, err := l.keys.Attach(context.WithValue(ctx, attachingKey{}, true), id)
	if err != nil {
		return nil
	}
	return []claims.Claim{c}
}
