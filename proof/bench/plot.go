package main

import (
	"fmt"
	"math"
	"slices"
	"strings"
)

// The colours stand out from both white and black, because an image in a README can't
// know its background.
const (
	plotText   = "#737b85"
	plotGrid   = "#737b8555"
	plotOthers = "#737b85"
	plotOurs   = "#2f81f7"
)

const (
	plotWidth  = 800
	plotLabels = 104 // width of the peers' names
	plotPanel  = 304 // width of a panel
	plotGap    = 56
	plotTop    = 64
	plotRow    = 30
)

// panel is one half of the plot: a figure, by peer.
type panel struct {
	measure, metric string
	title, subtitle string
}

var panels = []panel{
	{"handover", "1 standby", "Handover", "release until the next job runs"},
	{"failover", "beyond the TTL", "Failover", "beyond the TTL, until the next job runs"},
}

// span is what the plot shows for one peer, in milliseconds.
type span struct{ p50, p99 float64 }

// drawPlot draws the median and the 99th percentile of handovers and failovers,
// by peer, on logarithmic axes. It returns an SVG document.
func drawPlot(records []record, f facts) []byte {
	var names []string
	spans := map[panel]map[string]span{}
	least, most := math.Inf(1), 0.0
	for _, p := range panels {
		spans[p] = map[string]span{}
		for _, r := range records {
			if r.Measure != p.measure || !strings.HasPrefix(r.Metric, p.metric+" p") || r.Value <= 0 {
				continue
			}
			s := spans[p][r.Peer]
			if strings.HasSuffix(r.Metric, "p50") {
				s.p50 = r.Value
			} else {
				s.p99 = r.Value
			}
			spans[p][r.Peer] = s
			least, most = min(least, r.Value), max(most, r.Value)
			if !slices.Contains(names, r.Peer) {
				names = append(names, r.Peer)
			}
		}
	}
	if len(names) == 0 {
		least, most = 1, 10
	}
	slices.SortStableFunc(names, func(a, b string) int { return rank(a) - rank(b) })
	axis := axis{int(math.Floor(math.Log10(least))), int(math.Ceil(math.Log10(most)))}
	axis.to = max(axis.to, axis.from+1)

	bottom := plotTop + plotRow*len(names)
	height := bottom + 64
	var b strings.Builder
	b.WriteString(svgHead(plotWidth, height, "Handover and failover, by peer: median and 99th percentile"))
	for i, p := range panels {
		left := plotLabels + i*(plotPanel+plotGap)
		fmt.Fprintf(&b, `<text x="%d" y="20" font-size="17" font-weight="600">%s</text>`+"\n", left, p.title)
		fmt.Fprintf(&b, `<text x="%d" y="40">%s</text>`+"\n", left, p.subtitle)
		axis.draw(&b, left, bottom)
		for row, name := range names {
			if s, ok := spans[p][name]; ok {
				drawSpan(&b, left, row, axis, s, name == tenurePeer.name)
			}
		}
	}
	for row, name := range names {
		weight := "400"
		if name == tenurePeer.name {
			weight = "700"
		}
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end" font-weight="%s">%s</text>`+"\n",
			plotLabels-14, rowMiddle(row)+5, weight, escape(name))
	}
	legend := height - 12
	fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="5"/><text x="%d" y="%d">median</text>`+"\n", plotLabels+5, legend-5, plotLabels+16, legend)
	fmt.Fprintf(&b, `<circle cx="%d" cy="%d" r="4" fill="none" stroke="%s" stroke-width="2"/><text x="%d" y="%d">99th percentile</text>`+"\n",
		plotLabels+91, legend-5, plotText, plotLabels+102, legend)
	b.WriteString(svgEnd(plotLabels+2*plotPanel+plotGap, legend, f))
	return []byte(b.String())
}

func svgHead(width, height int, title string) string {
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" role="img" font-family="system-ui, sans-serif" font-size="14" fill="%s">`+"\n<title>%s</title>\n",
		width, height, width, height, plotText, title)
}

// svgEnd says what was measured on, in text that ends at x, and ends the document.
func svgEnd(x, y int, f facts) string {
	return fmt.Sprintf(`<text x="%d" y="%d" text-anchor="end">PostgreSQL %s, %d CPUs</text>`+"\n</svg>\n", x, y, escape(strings.Fields(f.Postgres + " ?")[0]), f.CPUs)
}

// axis is a logarithmic axis from one power of ten to another.
type axis struct{ from, to int }

// x returns the horizontal position of a value in a panel.
func (a axis) x(left int, v float64) float64 {
	share := (math.Log10(v) - float64(a.from)) / float64(a.to-a.from)
	return float64(left) + share*plotPanel
}

func (a axis) draw(b *strings.Builder, left, bottom int) {
	for power := a.from; power <= a.to; power++ {
		v := math.Pow10(power)
		x := a.x(left, v)
		fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s"/>`, x, plotTop-8, x, bottom, plotGrid)
		fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="middle" font-size="13">%s</text>`+"\n", x, bottom+18, inWords(v))
	}
}

func drawSpan(b *strings.Builder, left, row int, a axis, s span, ours bool) {
	colour := plotOthers
	if ours {
		colour = plotOurs
	}
	y, from, to := rowMiddle(row), a.x(left, s.p50), a.x(left, s.p99)
	fmt.Fprintf(b, `<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="%s" stroke-width="3"/>`, from, y, max(from, to-5), y, colour)
	fmt.Fprintf(b, `<circle cx="%.1f" cy="%d" r="4" fill="none" stroke="%s" stroke-width="2"/>`, to, y, colour)
	fmt.Fprintf(b, `<circle cx="%.1f" cy="%d" r="5" fill="%s"/>`, from, y, colour)

	// The label goes on the side that has room.
	text, x, anchor := inWords(s.p50), from-10, "end"
	if from-float64(left) < 70 {
		x, anchor = to+10, "start"
	}
	fmt.Fprintf(b, `<text x="%.1f" y="%d" text-anchor="%s" font-size="13" fill="%s">%s</text>`+"\n", x, y+5, anchor, colour, text)
}

// inWords formats milliseconds for readers.
func inWords(ms float64) string {
	if ms >= 1000 {
		return figure(ms/1000) + " s"
	}
	return figure(ms) + " ms"
}

func rowMiddle(row int) int { return plotTop + row*plotRow + plotRow/2 }

var escaper = strings.NewReplacer("&", "&amp;", "<", "&lt;", ">", "&gt;")

func escape(s string) string { return escaper.Replace(s) }
