package statuspage_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/shards"
	"github.com/tenurelib/tenure/statuspage"
)

// Browsers get a page, all other clients JSON.
func ExampleHandler() {
	lease, err := tenure.NewLease(tenure.Static(), tenure.LeaseConfig{Key: tenure.Key{Type: "lease", ID: "sweeper"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	coordinator, err := tenure.NewCoordinator(lease, tenure.CoordinatorConfig{})
	if err != nil {
		fmt.Println(err)
		return
	}
	mux := http.NewServeMux() // reachable only by operators
	mux.Handle("GET /leases", statuspage.Handler(coordinator))

	for _, accept := range []string{"text/html", "*/*"} {
		request, answer := httptest.NewRequest("GET", "/leases", nil), httptest.NewRecorder()
		request.Header.Set("Accept", accept)
		mux.ServeHTTP(answer, request)
		fmt.Println(answer.Code, answer.Header().Get("Content-Type"))
	}
	// Output:
	// 200 text/html; charset=utf-8
	// 200 application/json
}

// The session of this process, and its shards.
func ExampleSessions() {
	var session *claims.Session   // of claims.NewSession
	var partitions *shards.Member // of shards.New
	mux := http.NewServeMux()
	mux.Handle("GET /sessions", statuspage.Sessions(session))
	mux.Handle("GET /shards", statuspage.Shards(partitions))
}
